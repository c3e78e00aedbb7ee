"""lmlong bench slots: what shortening to k slots costs."""

import json
from pathlib import Path

import click

from lmlong.bench.slots_grid import USUAL, Grid, check
from lmlong.cli.numbers import read, write


@click.command()
@click.option("--slots", metavar="K,...", default=write(USUAL.slots), show_default=True, help="Numbers of slots.")
@click.option("--lengths", metavar="N,...", default=write(USUAL.lengths), show_default=True, help="Tokens of a text.")
@click.option("--copies", metavar="N,...", default=write(USUAL.copies), show_default=True, help="Tokens of a copy.")
@click.option(
    "--steps", default=USUAL.steps, show_default=True, type=click.IntRange(1), help="Training steps of 4,096 tokens."
)
@click.option("--width", default=USUAL.width, show_default=True, type=click.IntRange(2), help="Of the encoders.")
@click.option("--seed", default=0, show_default=True, type=click.IntRange(0), help="Start of weights and texts.")
@click.option(
    "--out", type=click.Path(file_okay=False, path_type=Path), help="Folder of the results.  [default: runs/slots]"
)
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write all sums as JSON.")
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="Draw them: .png, .pdf or .svg.")
def slots(
    slots: str,
    lengths: str,
    copies: str,
    steps: int,
    width: int,
    seed: int,
    out: Path | None,
    json_file: Path | None,
    plot: Path | None,
) -> None:
    """Measure what Linformer's shortening to k slots costs, on hidden words and on copies.

    Encoders with full attention and with Linformer are trained alike: to find hidden words of a text, by number of
    slots, by who shares matrices and by length; and to find symbols that stand half a text before, which words hardly
    need. Interrupted, it goes on where it stopped.

    \b
    Example: fewer slots and shorter texts, in half the time.
      lmlong bench slots --slots 16,64 --lengths 256,512 --copies 64
    """
    words, halves = (sorted(set(read(*each, int, "64,128"))) for each in (("--lengths", lengths), ("--copies", copies)))
    numbers = sorted(set(read("--slots", slots, int, "16,64")))
    grid = Grid(tuple(numbers), tuple(words), tuple(halves), steps, width, seed)
    check(grid)

    from lmlong.bench.slots import plain, study
    from lmlong.bench.slots_report import draw, table
    from lmlong.charts import check_format

    if plot:
        check_format(plot)
    found = study(grid, out or Path("runs/slots"))
    if json_file:
        json_file.write_text(json.dumps(plain(list(found.values())), indent=2) + "\n", encoding="utf-8")
    if plot:
        draw(grid, found, plot)
    click.echo(table(grid, found))
