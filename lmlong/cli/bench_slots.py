"""lmlong bench slots: how much Linformer's k slots lose."""

from pathlib import Path
from typing import Any

import click

from lmlong.cli import options
from lmlong.cli.lists import format_numbers, parse_numbers
from lmlong.cli.output import check_files, show
from lmlong.experiments.slots_grid import DEFAULT, SlotsGrid


@click.command()
@click.option(
    "--slots", metavar="K,...", default=format_numbers(DEFAULT.slots), show_default=True, help="Numbers of slots."
)
@click.option(
    "--lengths", metavar="N,...", default=format_numbers(DEFAULT.lengths), show_default=True, help="Tokens of a text."
)
@click.option(
    "--copies", metavar="N,...", default=format_numbers(DEFAULT.copies), show_default=True, help="Tokens of a copy."
)
@click.option(
    "--steps", default=DEFAULT.steps, show_default=True, type=click.IntRange(1), help="Training steps of 4,096 tokens."
)
@click.option("--width", default=DEFAULT.width, show_default=True, type=click.IntRange(2), help="Encoder width.")
@click.option("--seed", default=0, show_default=True, type=click.IntRange(0), help="Seed of weights and texts.")
@options.out("runs/slots")
@options.json_file
@options.plot("perplexity and accuracy by slots")
def slots(
    slots: str,
    lengths: str,
    copies: str,
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
    grid = SlotsGrid(
        _ascending("--slots", slots, "16,64"),
        _ascending("--lengths", lengths, "64,128"),
        _ascending("--copies", copies, "64,128"),
        **given,
    )
    grid.check()
    check_files(json_file, plot)

    from lmlong.experiments.slots import study_slots
    from lmlong.experiments.slots_report import figure, table

    results = study_slots(grid, out or Path("runs/slots"))
    drawn = figure(grid, results) if plot else None
    show(table(grid, results), list(results.values()), json_file, plot, drawn)


def _ascending(option: str, text: str, example: str) -> tuple[int, ...]:
    return tuple(sorted(set(parse_numbers(option, text, int, example))))
