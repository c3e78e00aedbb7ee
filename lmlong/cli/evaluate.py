"""`lmlong eval`: measure how well a model predicts text, recalls it, and solves tasks."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import click
from click.core import ParameterSource

from lmlong.cli import options
from lmlong.cli.options import parse_names
from lmlong.cli.output import report_left_out, run_name, show
from lmlong.errors import UsageError

if TYPE_CHECKING:
    from lmlong.data.token_file import TokenFile
    from lmlong.inference.trained_model import TrainedModel
    from lmlong.report.report import Report

Model = TypeVar("Model", bound="TrainedModel")

TEXT = ("data", "tokens")
PREDICTION = (*TEXT, "lengths", "min_documents", "precision", "learn", "weights")

OPTIONS = {
    "--by context": (*PREDICTION, "targets", "plot"),
    "--by position": (*PREDICTION, "plot"),
    "--by state": PREDICTION,
    "--by recall": (*TEXT, "lengths", "texts", "probes", "weights", "plot"),
    "--by spectrum": (*TEXT, "lengths", "texts", "plot"),
    "--tasks": ("lengths", "num_fewshot", "limit", "apply_chat_template", "weights"),
    "encoders": (*TEXT, "precision"),
    "models of labels": (*TEXT, "precision"),
}
"""The options of each measurement; options that are missing here apply to all."""

BY = tuple(name.removeprefix("--by ") for name in OPTIONS if name.startswith("--by "))
AS_TRAINED: Literal["32"] = "32"
"""The format of states of a model that is measured: that of training."""

ALONE = ("recall", "spectrum")
"""What is not measured together with something else."""


@click.command("eval")
@options.runs
@click.option(
    "--by",
    metavar="NAME,...",
    help=f"What to measure: {', '.join(BY)}.  [default: context,position]",
)
@click.option(
    "--tasks", metavar="NAME,...", help="Tasks of lm-evaluation-harness: names, groups, patterns, or .yaml files."
)
@options.data
@options.tokens
@options.lengths("Contexts, distances or lengths of texts, in tokens; k is 1,024.  [default: depends on --by]")
@click.option(
    "--targets",
    default=8192,
    metavar="N",
    type=options.TokenCount(1),
    help="About how many tokens are scored at each context, at least one in each of --min-documents documents.",
)
@click.option(
    "--min-documents",
    default=10,
    type=click.IntRange(1),
    help="Leave out lengths that fewer documents reach; fewer documents are cut into this many parts.",
)
@click.option(
    "--probes",
    metavar="NAME,...",
    default="copy,induction,mqar",
    help="What to recall: copy, induction, mqar, passkey, needle, or all.",
)
@click.option("--texts", type=click.IntRange(1), help="Texts at each length.  [default: 64 by recall, 8 by spectrum]")
@click.option("--num-fewshot", metavar="N", type=click.IntRange(0), help="Examples before each question of a task.")
@click.option("--limit", metavar="N", type=click.IntRange(1), help="Use the first N documents of each task.")
@click.option("--apply-chat-template", is_flag=True, help="Ask as a user, with the chat template of the model.")
@options.json_file
@options.plot("the results")
@options.precision
@options.threads
@options.loading
def eval_(
    runs: tuple[str, ...],
    by: str | None,
    tasks: str | None,
    json_file: Path | None,
    plot: Path | None,
    device: str,
    **given: Any,
) -> None:
    """Measure how well each RUN predicts text, and the gain from text further back.

    \b
    context   the same target tokens at each length, with N tokens before them
    position  each document read once, by the number of tokens before
    state     norm of S, features in use, smallest denominator while it reads
    recall    how often the model recalls something from N tokens before
    spectrum  the singular values of the attention matrices, by layer and head

    The text is the held-out text of the run, unless --data names another. Numbers after ± are standard errors over
    documents, or over parts of them if there are few, as for one book. The error of a change between lengths is that of
    the differences on the same tokens. For several runs, the differences from the first are printed, with their paired
    errors. With --learn, or if its recipe says so, a run is measured without learning and with it. Compare runs with
    different tokenizers by bits per byte. For an encoder, the perplexity of masked tokens is measured, beside what the
    frequency of each token in the training text achieves (unigram). For a model of labels, the share of documents with
    the correct label is measured, by length and by label, beside that of always the most frequent label (majority).

    \b
    What --by recall asks for, with --probes:
    copy       a sequence of symbols is repeated
    induction  one symbol is repeated: what followed it the first time?
    mqar       keys and their values, then the keys again
    passkey    a number in a sentence, then held-out text
    needle     several names and their words, then held-out text

    By spectrum: if a few singular values hold most of the sum, keys and values can be shortened to a few slots, as
    Linformer does.

    --tasks runs tasks of EleutherAI's lm-evaluation-harness, which fetches their data from the Hugging Face Hub. A
    context is read once for all its answers, and a document of any length in one pass, along the state.

    \b
    Example: one run on its own held-out text, then two on the same books.
      lmlong eval runs/quickstart --lengths 256,512,1k
      lmlong eval linear softmax --data 'books/*.txt' --plot length.png
      lmlong eval linear softmax --by recall --lengths 64,256,1k
      lmlong eval runs/quickstart --tasks arc_easy --num-fewshot 5
    """
    measurements = _measurements(runs, by, tasks)
    chosen = _options_of(measurements, click.get_current_context(), given)
    report_left_out(chosen.get("data", ()))
    if tasks is not None:
        report = _tasks(runs, device, tasks, **chosen)
    elif measurements == ["encoders"]:
        report = _encoders(runs, device, **chosen)
    elif measurements == ["models of labels"]:
        report = _labels(runs, device, **chosen)
    elif measurements == ["--by recall"]:
        report = _recall(runs, device, **chosen)
    elif measurements == ["--by spectrum"]:
        report = _spectrum(runs, device, **chosen)
    else:
        views = [name.removeprefix("--by ") for name in measurements]
        report = _prediction(runs, device, views, **chosen)
    show(report, json_file, plot)


def _measurements(runs: Sequence[str], by: str | None, tasks: str | None) -> list[str]:
    """Return the names in OPTIONS of what to measure."""
    if tasks is not None:
        if by is not None:
            raise UsageError("--by, --tasks: mutually exclusive. Give one of them.")
        return ["--tasks"]
    names = parse_names("--by", by or "context,position", BY)
    alone = [name for name in names if name in ALONE]
    if alone and len(names) > 1:
        raise UsageError(f"--by: {alone[0]} is measured alone. Measure the rest by another command.")
    objective = "causal" if alone else _objective(runs)
    if objective != "causal" and by is not None:
        raise UsageError(
            f"--by: {runs[0]} {WHAT[objective]}. Leave it out, give --by spectrum, or name a language model."
        )
    return [MEASURED[objective]] if objective != "causal" else [f"--by {name}" for name in names]


MEASURED = {"masked": "encoders", "label": "models of labels"}
WHAT = {
    "masked": "is an encoder (objective: masked), which reads both sides of each token at once and has no state",
    "label": "predicts the labels of documents (objective: label), which are measured by length and label",
}


def _objective(runs: Sequence[str]) -> str:
    """Return the objective that all runs have in common."""
    from lmlong.checkpoint.read import read_recipe, reading

    objectives = {run: reading(run, read_recipe).objective for run in runs}
    if len(set(objectives.values())) > 1:
        odd = next(run for run, objective in objectives.items() if objective != "causal")
        raise UsageError(f"{odd}: {WHAT[objectives[odd]]}. Name runs of one objective.")
    return objectives[runs[0]]


def _options_of(measurements: Sequence[str], context: click.Context, given: dict[str, Any]) -> dict[str, Any]:
    """Return the options of the measurements; raise a UsageError for one that was given and belongs to others."""
    for option in context.command.params:
        owners = [name for name, names in OPTIONS.items() if option.name in names]
        is_given = context.get_parameter_source(option.name or "") == ParameterSource.COMMANDLINE
        if is_given and owners and not any(name in owners for name in measurements):
            raise UsageError(
                f"{option.opts[0]}: belongs to {', '.join(owners)}, not to {', '.join(measurements)}. Leave it out."
            )
    names = {name for measurement in measurements for name in OPTIONS[measurement]}
    return {name: value for name, value in given.items() if name in names and value is not None}


def _prediction(
    runs: Sequence[str],
    device: str,
    views: Sequence[str],
    data: Sequence[str],
    weights: Any,
    learn: bool | None = None,
    **chosen: Any,
) -> "Report":
    from lmlong.checkpoint.read import read_recipe, reading
    from lmlong.evaluation.perplexity import evaluate
    from lmlong.evaluation.perplexity_report import perplexity_report
    from lmlong.inference.loading import load

    trained_lengths = [reading(run, read_recipe).text.sequence_length for run in runs]
    chosen |= {"views": views, "trained_lengths": trained_lengths}
    reports = []
    for run in runs:
        loaded = load(run, device, weights, AS_TRAINED, learn)
        for learns in [False, True] if loaded.learn else [False]:
            name = run_name(run) + (", learning" if learns else "")
            reports.append(evaluate(replace(loaded, learn=learns), data or None, name=name, **chosen))
    return perplexity_report(reports)


def _recall(
    runs: Sequence[str],
    device: str,
    data: Sequence[str],
    probes: str,
    weights: Any,
    tokens: int | None = None,
    **chosen: Any,
) -> "Report":
    from lmlong.evaluation.probe_accuracy import measure_probes, recall_report
    from lmlong.evaluation.probes import PROBES
    from lmlong.inference.loading import load

    asked = PROBES if probes == "all" else parse_names("--probes", probes, PROBES)
    names = [name for name in PROBES if name in asked]
    loaded = _with_text(runs, lambda run: load(run, device, weights, AS_TRAINED, False), data, tokens)
    return recall_report([measure_probes(*each, names, **chosen) for each in loaded])


def _spectrum(
    runs: Sequence[str], device: str, data: Sequence[str], tokens: int | None = None, **chosen: Any
) -> "Report":
    from lmlong.evaluation.spectrum import measure_spectra, spectrum_report
    from lmlong.inference.loading import open_run

    loaded = _with_text(runs, lambda run: open_run(run, device), data, tokens)
    return spectrum_report([spectrum for each in loaded for spectrum in measure_spectra(*each, **chosen)])


def _with_text(
    runs: Sequence[str], load: Callable[[str], Model], data: Sequence[str], tokens: int | None
) -> Iterator[tuple[str, Model, "TokenFile"]]:
    """Yield the name, the model and the text of each run; the text is its held-out one, unless `data` names files."""
    from lmlong.evaluation.perplexity import validation_text

    for run in runs:
        model = load(run)
        yield run_name(run), model, validation_text(model, data, tokens)


def _encoders(runs: Sequence[str], device: str, data: Sequence[str], **chosen: Any) -> "Report":
    from lmlong.evaluation.masked import masked_report, measure_masked
    from lmlong.inference.loading import open_run

    return masked_report([measure_masked(run_name(run), open_run(run, device), data, **chosen) for run in runs])


def _labels(runs: Sequence[str], device: str, data: Sequence[str], **chosen: Any) -> "Report":
    from lmlong.evaluation.labels import label_report, measure_labels
    from lmlong.inference.loading import load_classifier

    return label_report([measure_labels(run_name(run), load_classifier(run, device), data, **chosen) for run in runs])


def _tasks(runs: Sequence[str], device: str, tasks: str, weights: Any, **chosen: Any) -> "Report":
    from lmlong.evaluation.harness import evaluate_tasks, library, task_report
    from lmlong.inference.loading import load

    library()
    names = [name.strip() for name in tasks.split(",") if name.strip()]
    if not names:
        raise UsageError("--tasks: names no task. Name one or more, such as arc_easy,hellaswag.")
    if len(runs) > 1:
        raise UsageError("--tasks: runs with one model. Name one RUN.")
    return task_report(evaluate_tasks(load(runs[0], device, weights, AS_TRAINED, False), names, **chosen))
