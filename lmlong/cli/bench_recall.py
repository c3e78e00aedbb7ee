"""lmlong bench recall: how many key-value pairs fit into a state."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from lmlong.cli import options
from lmlong.cli.lists import format_numbers, numbers, parse_names
from lmlong.cli.output import show
from lmlong.experiments.recall_grid import DEFAULT_CANDIDATES, LARGE, SMALL, TOKENS_PER_PAIR


def _both(small: Sequence[float], large: Sequence[float]) -> str:
    return f"[default: {format_numbers(small)}; large: {format_numbers(large)}]"


@click.command()
@click.option("--only", metavar="NAME,...", help=f"Train only these.  [default: {','.join(DEFAULT_CANDIDATES)}]")
@numbers("--pairs", f"Numbers of pairs to recall.  {_both(SMALL.pairs, LARGE.pairs)}")
@numbers("--widths", f"Widths of the state.  {_both(SMALL.widths, LARGE.widths)}")
@click.option(
    "--vocabulary",
    type=click.IntRange(4),
    help=f"Size: half of the tokens are keys, half values.  {_both([SMALL.vocabulary], [LARGE.vocabulary])}",
)
@click.option(
    "--tokens-per-pair",
    type=click.IntRange(TOKENS_PER_PAIR),
    default=TOKENS_PER_PAIR,
    help="Length of a row; in longer rows some queries are further from their pairs.",
)
@numbers("--rates", f"Learning rates to choose from.  {_both(SMALL.rates, LARGE.rates)}", kind=float)
@click.option(
    "--steps", type=click.IntRange(1), help=f"Training steps of each model.  {_both([SMALL.steps], [LARGE.steps])}"
)
@click.option("--seed", default=0, type=click.IntRange(0), help="Seed of weights and rows.")
@click.option("--large", is_flag=True, help="The sizes of the paper, which take a GPU.")
@options.out("runs/recall")
@options.json_file
@options.plot("share answered against pairs")
def recall(
    only: str | None,
    seed: int,
    large: bool,
    out: Path | None,
    json_file: Path | None,
    plot: Path | None,
    **given: Any,
) -> None:
    """Measure how many pairs each attention recalls, by the width of its state.

    A row lists keys, each with its value, and then asks for the value of every key (multi-query associative recall).
    Models of two layers are trained on such rows, at each learning rate in turn until one recalls everything; the best
    is shown. An interrupted experiment resumes where it stopped.

    \b
    Example: linear attention alone, with more pairs.
      lmlong bench recall --only elu,elu-learned --pairs 8,16,32 --vocabulary 128
    """
    usual = LARGE if large else SMALL
    grid = usual._replace(**{name: value for name, value in given.items() if value is not None})
    grid.check()

    from lmlong.experiments.recall import figure, study_recall, table
    from lmlong.recipe.candidates import candidates
    from lmlong.recipe.kinds import plugin_candidates

    names = parse_names("--only", only, candidates()) if only else (*DEFAULT_CANDIDATES, *plugin_candidates())
    best, results = study_recall(grid, names, seed, out or Path("runs/recall"))
    show(table(best), results, json_file, plot, figure(best) if plot else None)
