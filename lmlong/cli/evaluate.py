"""lmlong eval: perplexity against length."""

from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from lmlong.cli import options
from lmlong.cli.lists import parse_names
from lmlong.cli.output import check_files, show
from lmlong.cli.runs import load_runs, run_name, tell_left_out
from lmlong.errors import UsageError

if TYPE_CHECKING:
    from lmlong.evaluation.results import PerplexityReport
    from lmlong.model.precision import Precision
    from lmlong.recipe import Recipe

DEFAULT_VIEWS = "context,position"


@click.command("eval")
@options.runs
@options.data
@click.option(
    "--lengths",
    metavar="N,...",
    help="Contexts to compare; k is 1,024.  [default: 256,512,1k ... 16k and the trained]",
)
@click.option(
    "--by",
    "views",
    metavar="VIEW,...",
    default=DEFAULT_VIEWS,
    show_default=True,
    help="What to measure, of context, recurrence, remembrance, position, protocol and state.",
)
@click.option("--cache-baseline", is_flag=True, help="Tell what counts of the document's n-grams add to the model.")
@click.option(
    "--targets",
    default=8192,
    show_default=True,
    metavar="N",
    type=options.Length(1),
    help="About how many tokens are scored at each context.",
)
@click.option(
    "--min-documents",
    default=10,
    show_default=True,
    type=click.IntRange(1),
    help="Leave out lengths that fewer documents reach; documents that are too few are cut into so many parts.",
)
@click.option(
    "--cluster-by",
    metavar="FIELD",
    help="Let documents with the same FIELD count as one for the errors: author, folder, file, or one of records.",
)
@options.tokens
@options.json_file
@options.plot("bits per byte")
@options.weights
@options.precision
@options.state_dtype
@options.threads
@options.device
def eval_(
    runs: tuple[str, ...],
    data: tuple[str, ...],
    lengths: str | None,
    views: str,
    cache_baseline: bool,
    targets: int,
    min_documents: int,
    cluster_by: str | None,
    tokens: int | None,
    json_file: Path | None,
    plot: Path | None,
    weights: Literal["32", "bf16", "int8"],
    precision: Literal["auto", "32", "bf16", "16"],
    state_dtype: Literal["32", "64"],
    device: str,
) -> None:
    """Measure how well each RUN predicts text, and the gain from text further back.

    \b
    context      the same tokens at each length, with so many tokens before them
    recurrence   those by how far back the same token or word last occurred
    remembrance  how far the text before a point changes the predictions
    position     each document read once, by how many tokens are before
    protocol     the state emptied at each window, overlapping windows, or carried
    state        norm of S, features in use, smallest denominator while it reads

    The first line of the output is the verdict: bits per byte at the longest context, and the gain from the shortest.

    The text is what the run held out of its training, unless --data names another. Standard errors are over documents,
    or over parts of them where there are few, as of one book; a change between lengths has the error of the differences
    on the same tokens. Documents of one author, say, are alike: --cluster-by lets them count as one. For the files of
    --data, author is what stands before the first "-" of a file's name. --cache-baseline mixes the model with plain
    counts of the bigrams and trigrams that the document had before, weighted as suits the text that the run was trained
    on: what they add is what the model leaves lying. Of several runs on the same text the differences from the first
    come next, with their paired errors. Compare runs with different tokenizers by bits per byte. An encoder is
    measured by the perplexity of hidden tokens instead.

    \b
    Example: one run on its own held-out text, then two on the same books.
      lmlong eval runs/quickstart --lengths 256,512,1k,2k
      lmlong eval linear softmax --data 'books/*.txt' --plot length.png
    """
    from lmlong.checkpoint.read import read_recipe, reading
    from lmlong.evaluation.perplexity import VIEWS, evaluate
    from lmlong.evaluation.perplexity_figure import figure
    from lmlong.evaluation.perplexity_report import table, to_json
    from lmlong.inference.loading import load
    from lmlong.recipe.lengths import parse_lengths

    wanted = parse_lengths(lengths) if lengths is not None else None
    chosen = parse_names("--by", views, VIEWS)
    check_files(json_file, plot)
    if plot and chosen == ("state",) and not cache_baseline:
        raise UsageError("--plot: draws all views but the state. Name another in --by.")
    causal_only = {
        "--lengths": lengths is not None,
        "--plot": plot is not None,
        "--by": views != DEFAULT_VIEWS,
        "--weights": weights != "32",
        "--state-dtype": state_dtype != "32",
        "--cache-baseline": cache_baseline,
        "--cluster-by": cluster_by is not None,
    }
    recipes = [reading(run, read_recipe) for run in runs]
    number_format = None if precision == "auto" else precision
    if _are_encoders(runs, recipes, [option for option, is_given in causal_only.items() if is_given]):
        _eval_encoders(runs, data, tokens, json_file, device, number_format)
        return
    tell_left_out(data)
    reports = []
    for run in runs:
        model = load(run, device, weights, state_dtype)
        report = evaluate(
            model,
            data or None,
            lengths=wanted,
            views=chosen,
            targets=targets,
            min_documents=min_documents,
            tokens=tokens,
            name=run_name(run),
            trained_lengths=[recipe.text.sequence_length for recipe in recipes],
            cache_baseline=cache_baseline,
            cluster_by=cluster_by,
            precision=number_format,
        )
        _note_left_out(report, min_documents)
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

    models = load_runs(runs, lambda run: open_run(run, device), data, tokens)
    reports = [measure_masked(*each, precision) for each in models]
    show(table(reports), to_json(reports), json_file, None)


def _are_encoders(runs: tuple[str, ...], recipes: list["Recipe"], causal_options: list[str]) -> bool:
    """Return whether the runs are encoders; options that need a language model are refused with them."""
    encoders = [run for run, recipe in zip(runs, recipes, strict=True) if recipe.objective == "masked"]
    if encoders and len(encoders) < len(runs):
        raise UsageError(
            f"{encoders[0]}: an encoder (objective: masked) is measured by hidden tokens alone. Name "
            "runs of one objective."
        )
    if encoders and causal_options:
        raise UsageError(
            f"{causal_options[0]}: {encoders[0]} is an encoder (objective: masked) that reads its text at once, on "
            "both sides of each token; it has no past to measure by and no state. Leave the option out, or name a "
            "language model."
        )
    return bool(encoders)


def _note_left_out(report: "PerplexityReport", min_documents: int) -> None:
    """Tell on standard error which lengths were left out."""
    from lmlong.recipe.lengths import name_length

    if report.left_out:
        names = ", ".join(map(name_length, report.left_out))
        unit = "documents" if report.parts_of is None else "parts"
        click.echo(f"{report.name}: fewer than {min_documents} {unit} reach {names}: left out", err=True)
