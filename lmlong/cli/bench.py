"""lmlong bench: experiments that compare attentions."""

import json
from pathlib import Path

import click

from lmlong.cli import completion, options
from lmlong.cli.bench_linformer import linformer
from lmlong.cli.bench_recall import recall
from lmlong.cli.bench_slots import slots
from lmlong.cli.bench_speed import attention, generate, train
from lmlong.cli.lists import parse_names, parse_numbers
from lmlong.cli.output import check_files, show
from lmlong.cli.plugins import load_recipe


@click.group()
def bench() -> None:
    """Compare attentions by experiment, on this machine.

    \b
    Example: the error of random features, by their number.
      lmlong bench approximation
    """


@bench.command()
@click.option(
    "--recipe",
    default="compare",
    show_default=True,
    shell_complete=completion.recipes,
    help="Recipe all have in common: a name or a file.",
)
@click.option(
    "--corpus",
    type=click.Choice(["recipe", "copies"]),
    default="recipe",
    show_default=True,
    help="The recipe's own text, or random letters said again and again.",
)
@click.option("--only", metavar="NAME,...", help="Train these alone.  [default: all]")
@click.option(
    "--rates",
    default="2e-3,4e-3,8e-3",
    show_default=True,
    help="Learning rates to choose from, and to go beyond where the best is at an end; one alone is taken.",
)
@click.option("--seeds", default=3, show_default=True, type=click.IntRange(1), help="Runs at the best learning rate.")
@click.option(
    "--out", type=click.Path(file_okay=False, path_type=Path), help="Folder of the runs.  [default: runs/compare]"
)
@options.json_file
@options.plot("bits per byte of each attention and seed")
@options.threads
@options.overrides
def compare(
    recipe: str,
    corpus: str,
    only: str | None,
    rates: str,
    seeds: int,
    out: Path | None,
    json_file: Path | None,
    plot: Path | None,
    overrides: tuple[str, ...],
) -> None:
    """Train every attention alike and tabulate bits per byte, parameters, speed and state.

    The learning rate of each is chosen by the first seed. Interrupted, it goes on where it stopped.

    \b
    Example: two attentions on text that only memory can predict.
      lmlong bench compare --corpus copies --only softmax,elu-learned
    """
    from lmlong.experiments.compare import candidates, compare_attentions
    from lmlong.experiments.compare_report import figure, table, to_json
    from lmlong.experiments.copies import write_copies

    load_recipe(recipe, overrides)  # with its plug-ins, which are candidates too
    names = parse_names("--only", only, candidates()) if only else tuple(candidates())
    check_files(json_file, plot)
    out = out or Path("runs/compare") / corpus
    changes = list(overrides)
    if corpus == "copies":
        out.mkdir(parents=True, exist_ok=True)
        write_copies(out / "copies.jsonl")
        source = json.dumps([{"kind": "files", "paths": [str(out / "copies.jsonl")]}])
        changes += [f"text.sources={source}", "text.tokenizer.kind=bytes"]
    learning_rates = parse_numbers("--rates", rates, float, "2e-3,4e-3")
    results, runs = compare_attentions(recipe, changes, names, learning_rates, seeds, out)
    show(table(results), to_json(runs), json_file, plot, figure(results) if plot else None)


@bench.command()
@click.option("--seeds", default=40, show_default=True, type=click.IntRange(1), help="Draws of inputs and features.")
@options.json_file
@options.plot("error against features")
@options.threads
def approximation(seeds: int, json_file: Path | None, plot: Path | None) -> None:
    """Measure the error of the random features of FAVOR+ against exact softmax attention.

    For positive, hyperbolic and trigonometric features of equal width, with orthogonal and independent rows of three
    kinds of norm, on normal inputs of several sizes.

    \b
    Example: the plot of docs/experiments/random-features.md.
      lmlong bench approximation --plot approximation.png
    """
    from lmlong.experiments.approximation import study_approximation
    from lmlong.experiments.approximation_report import figure, table, to_json

    check_files(json_file, plot)
    results = study_approximation(seeds)
    show(table(results), to_json(results), json_file, plot, figure(results) if plot else None)


for command in (recall, linformer, slots, attention, train, generate):
    bench.add_command(command)
