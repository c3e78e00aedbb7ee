"""lmlong probe: how far back a model recalls what it has read."""

from pathlib import Path
from typing import Literal

import click

from lmlong.cli import options
from lmlong.cli.lists import parse_names
from lmlong.cli.output import check_files, show
from lmlong.cli.runs import load_runs


@click.command()
@options.runs
@click.option(
    "--probe",
    "probes",
    metavar="NAME,...",
    default="copy,induction,mqar",
    show_default=True,
    help="Probes: copy, induction, mqar, passkey, needle, or all.",
)
@click.option("--lengths", metavar="N,...", help="Distances in tokens; k is 1,024.  [default: 64,256,1k,4k]")
@click.option("--trials", default=64, show_default=True, type=click.IntRange(1), help="Texts at each length.")
@click.option("--seed", default=0, show_default=True, type=click.IntRange(0), help="Seed of the texts.")
@options.data
@options.tokens
@options.json_file
@options.plot("accuracy by distance")
@options.weights
@options.state_dtype
@options.threads
@options.device
def probe(
    runs: tuple[str, ...],
    probes: str,
    lengths: str | None,
    trials: int,
    seed: int,
    data: tuple[str, ...],
    tokens: int | None,
    json_file: Path | None,
    plot: Path | None,
    weights: Literal["32", "bf16", "int8"],
    state_dtype: Literal["32", "64"],
    device: str,
) -> None:
    """Measure how often each RUN recalls something from N tokens before.

    \b
    copy       a sequence of symbols is repeated
    induction  one symbol is repeated: what followed it the first time?
    mqar       keys and their values, then the keys again
    passkey    a number in a sentence, then held-out text
    needle     several names and their words, then held-out text

    \b
    Example: two runs by distance.
      lmlong probe linear softmax --probe induction,mqar --lengths 64,256,1k
    """
    from lmlong.evaluation.probe_accuracy import DISTANCES, figure, measure_probes, table
    from lmlong.evaluation.probes import PROBES
    from lmlong.inference.loading import load
    from lmlong.recipe.lengths import parse_lengths

    asked = list(PROBES) if probes == "all" else parse_names("--probe", probes, PROBES)
    names = [name for name in PROBES if name in asked]
    distances = parse_lengths(lengths) if lengths is not None else DISTANCES
    check_files(json_file, plot)
    loaded = load_runs(runs, lambda run: load(run, device, weights, state_dtype), data, tokens)
    results = [measure_probes(*each, names, distances, trials, seed) for each in loaded]
    show(table(results), {"runs": results}, json_file, plot, figure(results) if plot else None)
