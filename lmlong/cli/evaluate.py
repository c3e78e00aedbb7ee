"""lmlong eval: bits per byte against length."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lmlong.cli import options
from lmlong.cli.lists import lengths, parse_names
from lmlong.cli.output import show
from lmlong.cli.runs import report_left_out, run_name
from lmlong.errors import UsageError

if TYPE_CHECKING:
    from lmlong.model.precision import Precision
    from lmlong.recipe import Recipe

DEFAULT_VIEWS = "context,position"


@click.command("eval")
@options.runs
@options.data
@lengths("Contexts to compare; k is 1,024.  [default: 256,512,1k ... 16k and the trained length]")
@click.option(
    "--by",
    "views",
    metavar="VIEW,...",
    default=DEFAULT_VIEWS,
    help="Views to measure: context, position, state.",
)
@click.option(
    "--targets",
    default=8192,
    metavar="N",
    type=options.TokenCount(1),
    help="About how many tokens are scored at each context, at least one in each of --min-documents documents.",
)
@click.option(
    "--after",
    metavar="N",
    type=options.TokenCount(1),
    help="Score tokens with at least N tokens before them.  [default: the longest of --lengths]",
)
@click.option(
    "--min-documents",
    default=10,
    type=click.IntRange(1),
    help="Leave out lengths that fewer documents reach; fewer documents are cut into this many parts.",
)
@options.tokens
@options.json_file
@options.plot("bits per byte and perplexity")
@options.precision
@options.learn
@options.loading
def eval_(
    runs: tuple[str, ...],
    data: tuple[str, ...],
    lengths: list[int] | None,
    views: str,
    tokens: int | None,
    json_file: Path | None,
    plot: Path | None,
    precision: "Precision | None",
    loading: options.Loading,
    **given: Any,
) -> None:
    """Measure how well each RUN predicts text, and the gain from text further back.

    \b
    context   the same target tokens at each length, with N tokens before them
    position  each document read once, by the number of tokens before
    state     norm of S, features in use, smallest denominator while it reads

    The first line of the output is the bits per byte at the longest context, and the gain from the shortest.

    The text is the held-out text of the run, unless --data names another. Numbers after ± are standard errors over
    documents, or over parts of them if there are few, as for one book. The error of a change between lengths is that of
    the differences on the same tokens. For several runs, the differences from the first are printed, with their paired
    errors. With --learn, or if its recipe says so, a run is measured without learning and with it. Compare runs with
    different tokenizers by bits per byte. For an encoder, the perplexity of masked tokens is measured, beside what the
    frequency of each token in the training text achieves (unigram).

    \b
    Example: one run on its own held-out text, then two on the same books.
      lmlong eval runs/quickstart --lengths 256,512,1k
      lmlong eval linear softmax --data 'books/*.txt' --plot length.png
    """
    from lmlong.checkpoint.read import read_recipe, reading
    from lmlong.evaluation.perplexity import VIEWS, evaluate
    from lmlong.evaluation.perplexity_figure import figure
    from lmlong.evaluation.perplexity_report import table, to_json

    chosen = parse_names("--by", views, VIEWS)
    if plot and chosen == ("state",):
        raise UsageError("--plot: the state view has no plot. Name another view in --by.")
    causal_only = {
        "--lengths": lengths is not None,
        "--plot": plot is not None,
        "--by": views != DEFAULT_VIEWS,
        "--weights": loading.weights != "32",
        "--state-dtype": loading.state_dtype != "auto",
        "--learn": loading.learn is not None,
        "--after": given["after"] is not None,
    }
    recipes = [reading(run, read_recipe) for run in runs]
    if _are_encoders(runs, recipes, [option for option, is_given in causal_only.items() if is_given]):
        _eval_encoders(runs, data, tokens, json_file, loading.device, precision)
        return
    report_left_out(data)
    reports = []
    for run in runs:
        loaded = loading.load_as_trained(run)
        for learn in [False, True] if loaded.learn else [False]:
            report = evaluate(
                replace(loaded, learn=learn),
                data or None,
                lengths=lengths,
                views=chosen,
                tokens=tokens,
                name=run_name(run) + (", learning" if learn else ""),
                trained_lengths=[recipe.text.sequence_length for recipe in recipes],
                precision=precision,
                **given,
            )
            reports.append(report)
    show(table(reports), to_json(reports), json_file, plot, figure(reports) if plot else None)


def _eval_encoders(
    runs: tuple[str, ...],
    data: tuple[str, ...],
    tokens: int | None,
    json_file: Path | None,
    device: str,
    precision: "Precision | None",
) -> None:
    from lmlong.evaluation.masked import measure_masked, table, to_json
    from lmlong.inference.loading import open_run

    report_left_out(data)
    reports = [measure_masked(run_name(run), open_run(run, device), data, tokens, precision) for run in runs]
    show(table(reports), to_json(reports), json_file, None)


def _are_encoders(runs: tuple[str, ...], recipes: list["Recipe"], causal_options: list[str]) -> bool:
    """Return whether the runs are encoders; options that need a language model are refused with them."""
    encoders = [run for run, recipe in zip(runs, recipes, strict=True) if recipe.objective == "masked"]
    if encoders and len(encoders) < len(runs):
        raise UsageError(
            f"{encoders[0]}: an encoder (objective: masked) is measured on hidden tokens only. Name runs of one "
            "objective."
        )
    if encoders and causal_options:
        raise UsageError(
            f"{causal_options[0]}: {encoders[0]} is an encoder (objective: masked), which reads both sides of each "
            "token at once and has no state. Leave the option out, or name a language model."
        )
    return bool(encoders)
