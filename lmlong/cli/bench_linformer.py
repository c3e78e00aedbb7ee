"""lmlong bench linformer: what Linformer saves."""

import json
from pathlib import Path

import click

from lmlong.bench.linformer_grid import USUAL, Grid, check
from lmlong.cli import options
from lmlong.cli.numbers import read, write


@click.command()
@click.option("--lengths", metavar="N,...", help="Tokens of the inputs; k is 1,024.  [default: 512,1k,2k ... 64k]")
@click.option(
    "--slots", metavar="K,...", default=write(USUAL.slots), show_default=True, help="What they are shortened to."
)
@click.option("--width", default=USUAL.width, show_default=True, type=click.IntRange(1), help="Of the layer.")
@click.option("--heads", default=USUAL.heads, show_default=True, type=click.IntRange(1))
@click.option("--rows", default=USUAL.rows, show_default=True, type=click.IntRange(1), help="Inputs side by side.")
@click.option(
    "--limit",
    metavar="SECONDS",
    default=USUAL.limit,
    show_default=True,
    type=click.FloatRange(min=0),
    help="Leave out full attention where one pass of it would take longer.",
)
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write all figures as JSON.")
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="Draw time a token: .png, .pdf or .svg.")
@options.device
def linformer(
    lengths: str | None,
    slots: str,
    width: int,
    heads: int,
    rows: int,
    limit: float,
    json_file: Path | None,
    plot: Path | None,
    device: str,
) -> None:
    """Measure how much faster Linformer is than full attention, and how much less memory it takes.

    A pass without gradients of the attention alone and of a whole layer, at each length with each number of slots; all
    have their turn in every round. The default is the shape of the paper's base model.

    \b
    Example: two lengths, in a minute.
      lmlong bench linformer --lengths 512,4k --slots 128
    """
    from lmlong.charts import check_format
    from lmlong.lengths import parse_lengths

    tokens = tuple(parse_lengths(lengths)) if lengths is not None else USUAL.lengths
    grid = Grid(tokens, tuple(sorted(set(read("--slots", slots, int, "128,256")))), width, heads, rows, limit)
    check(grid)
    if plot:
        check_format(plot)

    from lmlong.bench.cost import machine
    from lmlong.bench.linformer import measure
    from lmlong.bench.linformer_report import draw, plain, table
    from lmlong.model.device import pick_device

    place = pick_device(device)
    found = measure(grid, place)
    if json_file:
        json_file.write_text(json.dumps(plain(grid, machine(place), found), indent=2) + "\n", encoding="utf-8")
    if plot:
        draw(grid, found, plot)
    click.echo(table(grid, machine(place), found))
