"""lmlong bench: experiments that compare attentions."""

import json
from pathlib import Path

import click

from lmlong.cli.bench_linformer import linformer
from lmlong.cli.bench_recall import recall
from lmlong.cli.bench_slots import slots
from lmlong.cli.bench_speed import attention, generate, train
from lmlong.cli.numbers import read
from lmlong.errors import UsageError, nearest


@click.group()
def bench() -> None:
    """Compare attentions by experiment, on this machine.

    \b
    Example: how many random features come how near to softmax.
      lmlong bench approximation
    """


@bench.command("compare")
@click.option("--recipe", default="compare", show_default=True, help="Recipe all have in common: a name or a file.")
@click.option(
    "--corpus",
    type=click.Choice(["recipe", "copies"]),
    default="recipe",
    show_default=True,
    help="The recipe's own text, or random letters said again and again.",
)
@click.option("--only", metavar="NAME,...", help="Train these alone.  [default: all]")
@click.option("--rates", default="2e-3,4e-3,8e-3", show_default=True, help="Learning rates to choose from.")
@click.option("--seeds", default=3, show_default=True, type=click.IntRange(1), help="Runs at the best learning rate.")
@click.option(
    "--out", type=click.Path(file_okay=False, path_type=Path), help="Folder of the runs.  [default: runs/compare]"
)
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write all runs as JSON.")
@click.argument("overrides", nargs=-1, metavar="[KEY.PATH=VALUE ...]")
def compare_attentions(
    recipe: str,
    corpus: str,
    only: str | None,
    rates: str,
    seeds: int,
    out: Path | None,
    json_file: Path | None,
    overrides: tuple[str, ...],
) -> None:
    """Train every attention alike and tabulate bits per byte, parameters, speed and state.

    The learning rate of each is chosen from the same grid by the first seed. Interrupted, it goes on where it stopped.

    \b
    Example: two attentions on text that only memory can predict.
      lmlong bench compare --corpus copies --only softmax,elu-learned
    """
    from lmlong.bench.compare import CONTESTANTS, compare, table
    from lmlong.bench.copies import write_copies

    names = only.split(",") if only else list(CONTESTANTS)
    for name in names:
        if name not in CONTESTANTS:
            raise UsageError(f"--only: there is no '{name}'.{nearest(name, CONTESTANTS)}")
    out = out or Path("runs/compare") / corpus
    changes = list(overrides)
    if corpus == "copies":
        out.mkdir(parents=True, exist_ok=True)
        write_copies(out / "copies.jsonl")
        source = json.dumps([{"kind": "files", "paths": [str(out / "copies.jsonl")]}])
        changes += [f"text.sources={source}", "text.tokenizer.kind=bytes"]
    standings, runs = compare(recipe, changes, names, read("--rates", rates, float, "2e-3,4e-3"), seeds, out)
    if json_file:
        json_file.write_text(json.dumps([run._asdict() for run in runs], indent=2) + "\n", encoding="utf-8")
    click.echo(table(standings))


@bench.command()
@click.option("--seeds", default=40, show_default=True, type=click.IntRange(1), help="Draws of inputs and features.")
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write all errors as JSON.")
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="Draw error against features.")
def approximation(seeds: int, json_file: Path | None, plot: Path | None) -> None:
    """Measure how near the random features of FAVOR+ come to exact softmax attention.

    For positive, hyperbolic and trigonometric features of equal width, with orthogonal and independent rows of three
    kinds of norm, on normal inputs of several sizes.

    \b
    Example: the chart of the README.
      lmlong bench approximation --plot approximation.png
    """
    from lmlong.bench.approximation import study
    from lmlong.bench.approximation_report import draw, plain, table
    from lmlong.charts import check_format

    if plot:
        check_format(plot)
    results = study(seeds)
    if json_file:
        json_file.write_text(json.dumps(plain(results), indent=2) + "\n", encoding="utf-8")
    if plot:
        draw(results, plot)
    click.echo(table(results))


for command in (recall, linformer, slots, attention, train, generate):
    bench.add_command(command)
