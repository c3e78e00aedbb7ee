"""lmlong bench linformer: time and memory of Linformer."""

from pathlib import Path
from typing import Any

import click

from lmlong.bench.linformer_grid import DEFAULT, LinformerGrid
from lmlong.cli import options
from lmlong.cli.lists import lengths, numbers
from lmlong.cli.output import show
from lmlong.recipe.lengths import name_length


@click.command()
@lengths("Tokens of the inputs; k is 1,024.", ",".join(map(name_length, DEFAULT.lengths)))
@numbers("--slots", "Numbers of slots that keys and values are shortened to.", DEFAULT.slots)
@click.option("--width", default=DEFAULT.width, type=click.IntRange(1), help="Width of the layer.")
@click.option("--heads", default=DEFAULT.heads, type=click.IntRange(1))
@click.option("--rows", default=DEFAULT.rows, type=click.IntRange(1), help="Inputs side by side.")
@click.option(
    "--limit",
    metavar="SECONDS",
    default=DEFAULT.limit,
    type=click.FloatRange(min=0),
    help="Leave out full attention where one pass would take longer.",
)
@options.json_file
@options.plot("time per token")
@options.threads
@options.device
def linformer(
    lengths: list[int],
    slots: tuple[int, ...],
    json_file: Path | None,
    plot: Path | None,
    device: str,
    **given: Any,
) -> None:
    """Measure how much faster Linformer is than full attention, and how much less memory it takes.

    Times a pass without gradients of the attention alone and of a whole layer, at each length with each number of
    slots, in turns. The default is the shape of the paper's base model.

    \b
    Example: two lengths, in a minute.
      lmlong bench linformer --lengths 512,4k --slots 128
    """
    grid = LinformerGrid(tuple(lengths), tuple(sorted(set(slots))), **given)
    grid.check()

    from lmlong.bench.linformer_report import figure, table, to_json
    from lmlong.bench.linformer_speed import run_linformer_benchmark
    from lmlong.model.device import describe_machine, pick_device

    chosen = pick_device(device)
    results, machine = run_linformer_benchmark(grid, chosen), describe_machine(chosen)
    drawn = figure(grid, results) if plot else None
    show(table(grid, machine, results), to_json(grid, machine, results), json_file, plot, drawn)
