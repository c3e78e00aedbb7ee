"""lmlong bench recall: how many key-value pairs fit into a state."""

from pathlib import Path

import click

from lmlong.cli import options
from lmlong.cli.lists import format_numbers, parse_names, parse_numbers
from lmlong.cli.output import check_files, show
from lmlong.experiments.recall_grid import DEFAULT_CANDIDATES, LARGE, SMALL, TOKENS_PER_PAIR, RecallGrid


def _both(small: str, large: str) -> str:
    return f"[default: {small}; large: {large}]"


@click.command()
@click.option("--only", metavar="NAME,...", help=f"Train only these.  [default: {','.join(DEFAULT_CANDIDATES)}]")
@click.option(
    "--pairs",
    metavar="N,...",
    help=f"Numbers of pairs to recall.  {_both(format_numbers(SMALL.pairs), format_numbers(LARGE.pairs))}",
)
@click.option(
    "--widths",
    metavar="N,...",
    help=f"Widths of the state.  {_both(format_numbers(SMALL.widths), format_numbers(LARGE.widths))}",
)
@click.option(
    "--vocabulary",
    type=click.IntRange(4),
    help=f"Size: half of the tokens are keys, half values.  {_both(str(SMALL.vocabulary), str(LARGE.vocabulary))}",
)
@click.option(
    "--tokens-per-pair",
    type=click.IntRange(TOKENS_PER_PAIR),
    default=TOKENS_PER_PAIR,
    show_default=True,
    help="Length of a row; in longer rows some queries are further from their pairs.",
)
@click.option(
    "--rates",
    metavar="X,...",
    help=f"Learning rates to choose from.  {_both(format_numbers(SMALL.rates), format_numbers(LARGE.rates))}",
)
@click.option(
    "--steps",
    type=click.IntRange(1),
    help=f"Training steps of each model.  {_both(str(SMALL.steps), str(LARGE.steps))}",
)
@click.option("--seed", default=0, show_default=True, type=click.IntRange(0), help="Seed of weights and rows.")
@click.option("--large", is_flag=True, help="The sizes of the paper, which take a GPU.")
@options.out("runs/recall")
@options.json_file
@options.plot("share answered against pairs")
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
    plot: Path | None,
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
    grid = RecallGrid(
        vocabulary or usual.vocabulary,
        parse_numbers("--pairs", pairs, int, "4,8,16") if pairs else usual.pairs,
        tokens_per_pair,
        parse_numbers("--widths", widths, int, "32,64") if widths else usual.widths,
        parse_numbers("--rates", rates, float, "8e-3,4e-3") if rates else usual.rates,
        steps or usual.steps,
        usual.queries,
    )
    grid.check()
    check_files(json_file, plot)

    from lmlong.experiments.recall import figure, study_recall, table, to_json
    from lmlong.recipe.candidates import candidates
    from lmlong.recipe.kinds import plugin_candidates

    names = parse_names("--only", only, candidates()) if only else (*DEFAULT_CANDIDATES, *plugin_candidates())
    best, results = study_recall(grid, names, seed, out or Path("runs/recall"))
    show(table(best), [to_json(result) for result in results], json_file, plot, figure(best) if plot else None)
