"""lmlong bench slots: how much Linformer's k slots lose."""

from pathlib import Path
from typing import Any

import click

from lmlong.cli import options
from lmlong.cli.lists import numbers
from lmlong.cli.output import show
from lmlong.experiments.slots_grid import DEFAULT, SlotsGrid


@click.command()
@numbers("--slots", "Numbers of slots.", DEFAULT.slots)
@numbers("--lengths", "Tokens of a text.", DEFAULT.lengths)
@numbers("--copies", "Tokens of a text whose second half repeats the first.", DEFAULT.copies)
@click.option("--steps", default=DEFAULT.steps, type=click.IntRange(1), help="Training steps of 4,096 tokens.")
@click.option("--width", default=DEFAULT.width, type=click.IntRange(2), help="Encoder width.")
@click.option("--seed", default=0, type=click.IntRange(0), help="Seed of weights and texts.")
@options.out("runs/slots")
@options.json_file
@options.plot("perplexity and accuracy by slots")
def slots(
    slots: tuple[int, ...],
    lengths: tuple[int, ...],
    copies: tuple[int, ...],
    out: Path | None,
    json_file: Path | None,
    plot: Path | None,
    **given: Any,
) -> None:
    """Measure how much quality Linformer loses with k slots, on hidden words and on copies.

    Encoders with full attention and with Linformer are trained alike: to predict hidden words of a text, by number of
    slots, by which parts share projections and by length; and to predict symbols that are half a text back, which
    words hardly need. An interrupted experiment resumes where it stopped.

    \b
    Example: fewer slots and shorter texts, in half the time.
      lmlong bench slots --slots 16,64 --lengths 256,512 --copies 64
    """
    slots, lengths, copies = (tuple(sorted(set(each))) for each in (slots, lengths, copies))
    grid = SlotsGrid(slots, lengths, copies, **given)
    grid.check()

    from lmlong.experiments.slots import figure, study_slots, table

    results = study_slots(grid, out or Path("runs/slots"))
    drawn = figure(grid, results) if plot else None
    show(table(grid, results), list(results.values()), json_file, plot, drawn)
