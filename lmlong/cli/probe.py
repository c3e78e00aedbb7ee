"""lmlong probe: how far back a model recalls what it has read."""

from pathlib import Path

import click

from lmlong.cli import options
from lmlong.cli.lists import lengths, parse_names
from lmlong.cli.output import show
from lmlong.cli.runs import load_runs


@click.command()
@options.runs
@click.option(
    "--probe",
    "probes",
    metavar="NAME,...",
    default="copy,induction,mqar",
    help="Probes: copy, induction, mqar, passkey, needle, or all.",
)
@lengths("Distances in tokens; k is 1,024.", "64,256,1k,4k")
@click.option("--trials", default=64, type=click.IntRange(1), help="Texts at each length.")
@click.option("--seed", default=0, type=click.IntRange(0), help="Seed of the texts.")
@options.data
@options.tokens
@options.json_file
@options.plot("accuracy by distance")
@options.loading
def probe(
    runs: tuple[str, ...],
    probes: str,
    lengths: list[int],
    trials: int,
    seed: int,
    data: tuple[str, ...],
    tokens: int | None,
    json_file: Path | None,
    plot: Path | None,
    loading: options.Loading,
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
    from lmlong.evaluation.probe_accuracy import figure, measure_probes, table
    from lmlong.evaluation.probes import PROBES

    asked = list(PROBES) if probes == "all" else parse_names("--probe", probes, PROBES)
    names = [name for name in PROBES if name in asked]
    loaded = load_runs(runs, loading.load_as_trained, data, tokens)
    results = [measure_probes(*each, names, lengths, trials, seed) for each in loaded]
    show(table(results), {"runs": results}, json_file, plot, figure(results) if plot else None)
