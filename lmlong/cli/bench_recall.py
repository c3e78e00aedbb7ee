"""lmlong bench recall: how many pairs fit into a state."""

import json
from pathlib import Path

import click

from lmlong.bench.recall_grid import LARGE, SHOWN, SMALL, TOKENS_PER_PAIR, Grid, check, choose
from lmlong.cli.numbers import read, write


def _both(small: str, large: str) -> str:
    return f"[default: {small}; large: {large}]"


@click.command()
@click.option("--only", metavar="NAME,...", help=f"Train these alone.  [default: {','.join(SHOWN)}]")
@click.option(
    "--pairs", metavar="N,...", help=f"Numbers of pairs to recall.  {_both(write(SMALL.pairs), write(LARGE.pairs))}"
)
@click.option(
    "--widths", metavar="N,...", help=f"Widths of the state.  {_both(write(SMALL.widths), write(LARGE.widths))}"
)
@click.option(
    "--vocabulary",
    type=click.IntRange(4),
    help=f"Half of it are keys, half values.  {_both(str(SMALL.vocabulary), str(LARGE.vocabulary))}",
)
@click.option(
    "--tokens-per-pair",
    type=click.IntRange(TOKENS_PER_PAIR),
    default=TOKENS_PER_PAIR,
    show_default=True,
    help="Length of a row; in longer ones some queries are further off.",
)
@click.option(
    "--rates",
    metavar="X,...",
    help=f"Learning rates to choose from.  {_both(write(SMALL.rates), write(LARGE.rates))}",
)
@click.option(
    "--steps",
    type=click.IntRange(1),
    help=f"Training steps of each model.  {_both(str(SMALL.steps), str(LARGE.steps))}",
)
@click.option("--seed", default=0, show_default=True, type=click.IntRange(0), help="Start of weights and rows.")
@click.option("--large", is_flag=True, help="Train as large as the paper did, which takes a GPU.")
@click.option(
    "--out", type=click.Path(file_okay=False, path_type=Path), help="Folder of the results.  [default: runs/recall]"
)
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write all models as JSON.")
def recall(
    only: str | None,
    pairs: str | None,
    widths: str | None,
    vocabulary: int | None,
    tokens_per_pair: int,
    rates: str | None,
    steps: int | None,
    seed: int,
    large: bool,
    out: Path | None,
    json_file: Path | None,
) -> None:
    """Measure how many pairs each attention recalls, by the width of its state.

    A row tells keys, each with its value, and then asks for the value of every key (multi-query associative recall).
    Models of two layers are trained on it, at each learning rate in turn until one recalls everything; the best is
    shown. Interrupted, it goes on where it stopped.

    \b
    Example: linear attention alone, with more pairs.
      lmlong bench recall --only elu,elu-learned --pairs 8,16,32 --vocabulary 128
    """
    usual = LARGE if large else SMALL
    grid = Grid(
        vocabulary or usual.vocabulary,
        read("--pairs", pairs, int, "4,8,16") if pairs else usual.pairs,
        tokens_per_pair,
        read("--widths", widths, int, "32,64") if widths else usual.widths,
        read("--rates", rates, float, "8e-3,4e-3") if rates else usual.rates,
        steps or usual.steps,
        usual.queries,
    )
    check(grid)

    from lmlong.bench.compare import CONTESTANTS
    from lmlong.bench.recall import compare, plain, table

    best, runs = compare(grid, choose(only, CONTESTANTS), seed, out or Path("runs/recall"))
    if json_file:
        json_file.write_text(json.dumps([plain(run) for run in runs], indent=2) + "\n", encoding="utf-8")
    click.echo(table(best))
