"""lmlong bench: experiments that compare attentions."""

import json
from pathlib import Path

import click

from lmlong.cli import completion, options
from lmlong.cli.bench_linformer import linformer
from lmlong.cli.bench_recall import recall
from lmlong.cli.bench_slots import slots
from lmlong.cli.bench_speed import attention, generate, train
from lmlong.cli.lists import numbers, parse_names
from lmlong.cli.output import show
from lmlong.cli.plugins import load_recipe
from lmlong.recipe.candidates import NOT_TRAINED, candidates


@click.group()
def bench() -> None:
    """Compare attentions by experiment, on this machine.

    \b
    Example: the error of random features, by their number.
      lmlong bench approximation
    """


@bench.command()
@click.option(
    "--recipe", default="compare", shell_complete=completion.recipes, help="Recipe of all models: a name or a file."
)
@click.option(
    "--corpus",
    type=click.Choice(["recipe", "copies"]),
    default="recipe",
    help="The recipe's own text, or random letters that are repeated.",
)
@click.option("--only", metavar="NAME,...", help=f"Train only these.  [default: all but {','.join(NOT_TRAINED)}]")
@numbers(
    "--rates",
    "Learning rates to choose from, and to extend if the best is at an end; a single one is used as it is.",
    (2e-3, 4e-3, 8e-3),
    float,
)
@click.option("--seeds", default=3, type=click.IntRange(1), help="Runs at the best learning rate.")
@options.out("runs/compare", "Folder of the runs.")
@options.json_file
@options.plot("bits per byte of each attention and seed")
@options.threads
@options.overrides
def compare(
    recipe: str,
    corpus: str,
    only: str | None,
    rates: tuple[float, ...],
    seeds: int,
    out: Path | None,
    json_file: Path | None,
    plot: Path | None,
    overrides: tuple[str, ...],
) -> None:
    """Train every attention alike and tabulate bits per byte, parameters, speed and state.

    The learning rate of each is chosen with the first seed. An interrupted comparison resumes where it stopped.

    \b
    Example: two attentions on text that only memory can predict.
      lmlong bench compare --corpus copies --only softmax,elu-learned
    """
    from lmlong.experiments.compare import compare_attentions, figure, table, write_copies

    load_recipe(recipe, overrides)  # loads its plug-ins, which are candidates too
    every = tuple(name for name in candidates() if name not in NOT_TRAINED)
    names = parse_names("--only", only, candidates()) if only else every
    out = out or Path("runs/compare") / corpus
    changes = list(overrides)
    if corpus == "copies":
        out.mkdir(parents=True, exist_ok=True)
        write_copies(out / "copies.jsonl")
        source = json.dumps([{"kind": "files", "paths": [str(out / "copies.jsonl")]}])
        changes += [f"text.sources={source}", "text.tokenizer.kind=bytes"]
    results, runs = compare_attentions(recipe, changes, names, rates, seeds, out)
    show(table(results), runs, json_file, plot, figure(results) if plot else None)


@bench.command()
@click.option("--seeds", default=40, type=click.IntRange(1), help="Draws of inputs and features.")
@options.json_file
@options.plot("error against features")
@options.threads
def approximation(seeds: int, json_file: Path | None, plot: Path | None) -> None:
    """Measure the error of the random features of FAVOR+ against exact softmax attention.

    Compares positive, hyperbolic and trigonometric features of equal width, with orthogonal and independent rows of
    three kinds of norm, on normal inputs of several sizes.

    \b
    Example: the plot of docs/experiments/random-features.md.
      lmlong bench approximation --plot approximation.png
    """
    from lmlong.experiments.approximation import figure, study_approximation, table

    results = study_approximation(seeds)
    show(table(results), results, json_file, plot, figure(results) if plot else None)


for command in (recall, linformer, slots, attention, train, generate):
    bench.add_command(command)
