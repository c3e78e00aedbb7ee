"""A report on runs as one HTML page that needs nothing else."""

import shlex
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from lmlong import __version__
from lmlong.checkpoint.environment import text_sources
from lmlong.evaluation import perplexity_report, probe_accuracy, run_report
from lmlong.evaluation.perplexity import VIEWS
from lmlong.evaluation.results import CONTEXT, PerplexityReport
from lmlong.evaluation.run_report import ReportedRun
from lmlong.evaluation.training_curves import UNITS, TrainingCurves, time_unit, training_panels
from lmlong.model.state_size import binary_size
from lmlong.recipe import file as recipe_file
from lmlong.recipe.lengths import name_length
from lmlong.recipe.paths import last_part, without_folders
from lmlong.report.chart import charts
from lmlong.report.figure import Panel, lines_of
from lmlong.report.html import Html, data_table, details, element, page
from lmlong.report.report import Table
from lmlong.report.table import Column, cell_texts, format_number, in_words, plural

SAMPLES, SAMPLE_SIZE = 4, 2000
"""Samples of a run that are shown, and the largest number of characters of each."""

Parts = list[Html]


def run_page(runs: Sequence[ReportedRun]) -> str:
    """Return the page."""
    title = " and ".join(run.name for run in runs)
    sections = {
        "Summary": [_by_run(runs, [*SUMMARY, *_measures(runs)], "What was trained, and how well it predicts")],
        "Training text": _text(runs),
        "Training": _training(runs),
        "Samples": _samples(runs),
        "Prediction by context": _perplexity(runs),
        "Recall": _recall(runs),
        "State": _state(runs),
        "Speed and size": [_by_run(runs, SPEED, "Tokens per second, and bytes of the state of one text")],
        "Recipe": _recipes(runs),
        "Environment": [_by_run(runs, ENVIRONMENT, "Where the run was trained")],
        "Reproduce": _commands(runs),
    }
    for name, parts in sections.items():
        parts += [_p(f"{run.name}: left out: {run.left_out[name]}.") for run in runs if name in run.left_out]
    verdicts = [perplexity_report.verdict(report) for report in _reports(runs)]
    intro = [_p(verdict) for verdict in verdicts if verdict]
    return page(f"Report: {title}", intro, {name: parts for name, parts in sections.items() if parts}, FOOTER)


FOOTER = f"Written by lmlong {__version__}. Files are named without their folders."


def _p(text: str) -> Html:
    return element("p", text)


def _by_run(runs: Sequence[ReportedRun], facts: Sequence[Column], caption: str) -> Html:
    """Return a table with a row for each fact and a column for each run; facts that no run has are left out."""
    columns = [Column(title, align="<") for title in ("", *(run.name for run in runs))]
    texts = zip(*(cell_texts(facts, run) for run in runs), strict=True)
    rows = [[fact.title, *of_runs] for fact, of_runs in zip(facts, texts, strict=True) if any(of_runs)]
    return data_table(Table(caption, columns, rows))


def _fact(name: str) -> Callable[[ReportedRun], Any]:
    return lambda run: run.facts.get(name)


def _loss(run: ReportedRun) -> str | None:
    if not (validation := run.facts["validation"]):
        return None
    named = {"bits_per_byte": "bits per byte", "nats_per_token": "nats per token"}
    losses = [f"{validation[key]:.4f} {name}" for key, name in named.items() if key in validation]
    return f"{', '.join(losses)} (step {validation['step']:,})"


def _model(run: ReportedRun) -> str:
    model = run.recipe.model
    return f"{model.layers} layers of width {model.width} with {model.heads} heads"


def _tokenizer(run: ReportedRun) -> str:
    return f"{run.recipe.text.tokenizer.kind}, {run.facts['vocabulary']:,} tokens"


def _trained(run: ReportedRun) -> str:
    step, last = run.facts["step"], max((entry["step"] for entry in run.metrics), default=0)
    of = f", of a run of {last:,} steps" if last > step else ""
    return f"{run.facts['trained tokens']:,} tokens in {step:,} steps{of}"


def _trained_time(run: ReportedRun) -> str | None:
    until = [entry for entry in run.metrics if entry["step"] <= run.facts["step"]]
    seconds = TrainingCurves.of(run.name, run.recipe, until).seconds
    if not len(seconds):
        return None
    unit = time_unit(seconds[-1])
    return f"{seconds[-1] / UNITS[unit]:,.1f} {unit} of training steps ({run.recipe.training.clock} clock)"


def _at_longest(run: ReportedRun) -> str | None:
    for report in _reports([run]):
        for length, sums, _ in report.context[-1:]:
            value, error = sums.per_byte
            return f"{value:.4f} ± {format_number(error, '.4f')} bits per byte at {name_length(length)}"
    return None


def _masked(run: ReportedRun) -> str | None:
    masked = run.measured and run.measured.masked
    if not masked:
        return None
    beside = f" (unigram: {masked.unigram:,.3f})" if masked.unigram else ""
    return f"{masked.sums.totals.perplexity:,.3f} ± {format_number(masked.error, '.3f')}{beside}"


def _labels(run: ReportedRun) -> str | None:
    labels = run.measured and run.measured.labels
    if not labels:
        return None
    accuracy, error = labels.all.accuracy
    return f"{accuracy:.3f} ± {format_number(error, '.3f')} of {plural(labels.all.documents, 'document')}"


def _trained_per_second(run: ReportedRun) -> float | None:
    speeds = [entry["tokens_per_second"] for entry in run.metrics if entry.get("tokens_per_second")]
    return statistics.median(speeds) if speeds else None


def _read_per_second(run: ReportedRun) -> float | None:
    return next((report.tokens / max(report.seconds, 1e-9) for report in _reports([run])), None)


SUMMARY = [
    Column("objective", value=_fact("objective")),
    Column("model", value=_model),
    Column("attention by layer", format=in_words, value=_fact("attention by layer")),
    Column("window beside", format=",", value=_fact("window beside")),
    Column("parameters", format=",", value=_fact("parameters")),
    Column("in tables of n-grams", format=",", value=_fact("in tables of n-grams")),
    Column("tokenizer", value=_tokenizer),
    Column("trained on", value=_trained),
    Column("trained length", format=",", value=_fact("trained length")),
    Column("training time", value=_trained_time),
    Column("validation loss", value=_loss),
]
SPEED = [
    Column("measured on", value=lambda run: run.measured and run.measured.machine),
    Column("training, median of steps", format=",.0f", value=_trained_per_second),
    Column("reading, as in evaluation", format=",.0f", value=_read_per_second),
    Column("writing one text", format=",.0f", value=lambda run: run.measured and run.measured.written_per_second),
    Column("decoded by", value=_fact("decoded by")),
    Column("kernels", format=in_words, value=_fact("kernels here")),
    Column("state", format=binary_size, value=_fact("state bytes")),
    Column("state added by each token", format=binary_size, value=_fact("state bytes per token")),
    Column("state with --learn", format=binary_size, value=_fact("state bytes with --learn")),
]
ENVIRONMENT = [
    Column("began", value="environment.begun"),
    Column("machine", value="environment.machine"),
    Column("device", value=lambda run: run.environment.device or run.recipe.device),
    Column("threads", value=lambda run: run.environment.threads or None),
    Column("python", value="environment.python"),
    Column("packages", format=in_words, value=lambda run: run.environment.packages or None),
]
AMOUNTS = ("documents", "bytes", "tokens")
SOURCES = [
    Column("source", align="<", value="name"),
    *(Column(amount, format=",", value=f"train.{amount}") for amount in AMOUNTS),
    *(Column(f"held-out {amount}", format=",", value=f"validation.{amount}") for amount in AMOUNTS),
]


def _measures(runs: Sequence[ReportedRun]) -> list[Column]:
    """Return the facts that were measured for the report, which name its text."""
    text = _measured_text(runs)
    return [
        Column(f"measured on {text}", value=_at_longest),
        Column(f"perplexity of masked tokens of {text}", value=_masked),
        Column(f"accuracy of labels of {text}", value=_labels),
    ]


def _measured_text(runs: Sequence[ReportedRun]) -> str:
    """Return the text that the measurements are of: the held-out text, or the files of --data."""
    files = next((run.measured.files for run in runs if run.measured), ())
    if not files:
        return "held-out text"
    others = f" and {plural(len(files) - 1, 'other')}" if len(files) > 1 else ""
    return f"{last_part(str(files[0]))}{others} (given by --data)"


def _text(runs: Sequence[ReportedRun]) -> Parts:
    sources = {run.name: text_sources(run.environment, run.recipe) for run in runs}
    return [data_table(Table(f"Text of {name}, by source", SOURCES, rows)) for name, rows in sources.items() if rows]


def _training(runs: Sequence[ReportedRun]) -> Parts:
    panels = training_panels(_curves(runs))
    note = "Training loss is that of single steps; validation is an even sample of the held-out text."
    return [_p(note), charts(panels)] if panels else []


def _curves(runs: Sequence[ReportedRun]) -> list[TrainingCurves]:
    return [TrainingCurves.of(run.name, run.recipe, run.metrics) for run in runs]


def _samples(runs: Sequence[ReportedRun]) -> Parts:
    parts = []
    for run in runs:
        samples = [entry for entry in run.metrics if isinstance(entry.get("sample"), str)]
        last = len(samples) - 1
        for at in sorted({round(last * number / (SAMPLES - 1)) for number in range(SAMPLES)} if samples else ()):
            parts.append(element("h3", f"{run.name}, step {samples[at]['step']:,}"))
            parts.append(element("pre", samples[at]["sample"][:SAMPLE_SIZE]))
    return parts


def _reports(runs: Sequence[ReportedRun]) -> list[PerplexityReport]:
    return [run.measured.perplexity for run in runs if run.measured and run.measured.perplexity]


def _perplexity(runs: Sequence[ReportedRun]) -> Parts:
    reports = _reports(runs)
    if not reports:
        return []
    note = (
        f"Measured on {_measured_text(runs)}. By context: the same tokens, each time with that many tokens before "
        f"them. By position: each {reports[0].unit} read once, from its beginning. Numbers after ± are standard errors "
        f"over {reports[0].unit}s; an asterisk marks the length of training."
    )
    parts = [_p(note), charts(perplexity_report.figure(reports).panels)]
    for table in [table for compared in perplexity_report.differences(reports) for table in compared.tables]:
        if isinstance(table, str):
            parts.append(_p(table))
        else:
            parts.append(data_table(table._replace(title=table.title.splitlines()[0].rstrip(":"))))
    for report in reports:
        title = f"{report.name}, by context; {perplexity_report.OF_CHANGE}"
        parts.append(data_table(Table(title, CONTEXT, report.by_context)))
    return parts


def _recall(runs: Sequence[ReportedRun]) -> Parts:
    results = [run.measured.recall for run in runs if run.measured and run.measured.recall]
    if not results:
        return []
    note = (
        f"How often the likeliest token is the right one where a text of symbols repeats something, in "
        f"{results[0].scores[0].texts} texts for each distance: a whole sequence (copy), what followed one symbol "
        "(induction), the values of eight keys (mqar)."
    )
    return [_p(note), charts(probe_accuracy.figure(results).panels)]


def _state(runs: Sequence[ReportedRun]) -> Parts:
    healths = [(report.name, report.health) for report in _reports(runs) if report.health]
    positions = sorted({point.position for _, points in healths for point in points})
    common: dict[str, Any] = {"x_label": "tokens read", "ticks": positions, "tick_name": name_length, "y_scale": "log"}
    shown = {
        "norm": ("Norm of the state S", "median of layers and heads"),
        "smallest": ("Smallest denominator while reading", "smallest of layers and heads"),
    }
    panels = [
        Panel(lines_of(healths, "position", value, marker_size=5), title, y_label=label, **common)
        for value, (title, label) in (shown if healths else {}).items()
    ]
    return [charts(panels)] if panels else []


def _recipes(runs: Sequence[ReportedRun]) -> Parts:
    """Return the options that differ, and each recipe."""
    parts: Parts = []
    if len(runs) > 1:
        options = [recipe_file.flat(without_folders(run.recipe.model_dump())) for run in runs]
        keys = dict.fromkeys(key for each in options for key in each)
        rows = [[key, *(str(each.get(key, "")) for each in options)] for key in keys]
        columns = [Column(title, align="<") for title in ("option", *(run.name for run in runs))]
        differ = [row for row in rows if len(set(row[1:])) > 1]
        parts.append(data_table(Table("Options that differ", columns, differ)))
    for run in runs:
        recipe = element("pre", recipe_file.dump_without_folders(run.recipe))
        parts.append(details(f"{run.recipe.name}.yaml of {run.name}", recipe, class_="printed"))
    return parts


def _commands(runs: Sequence[ReportedRun]) -> Parts:
    parts = [_p("Save the recipe as a file, adjust the paths of its text, and train:")]
    names = [run.path or run.name for run in runs]
    if unnamed := [run.name for run in runs if run.path is None]:
        parts.append(_p(f"In these commands, {' and '.join(unnamed)} stands for the path of the run."))
    for run, path in zip(runs, names, strict=True):
        folder = path.partition("/checkpoints/")[0]
        parts.append(element("pre", shlex.join(["lmlong", "train", f"{run.recipe.name}.yaml", "--out", folder])))
    measured = next((run.measured for run in runs if run.measured and run.measured.perplexity), None)
    if measured:
        data = [word for file in measured.files for word in ("--data", last_part(str(file)))]
        text = [*data, "--tokens", str(measured.tokens)]
        views, targets = ",".join(VIEWS), str(run_report.TARGETS)
        probes, lengths = ",".join(run_report.PROBES), ",".join(map(name_length, run_report.DISTANCES))
        texts = ["--texts", str(run_report.TRIALS)]
        commands = [
            ["lmlong", "eval", *names, "--by", views, "--targets", targets, *text],
            ["lmlong", "eval", *names, "--by", "recall", "--probes", probes, "--lengths", lengths, *texts, *text],
        ]
        parts += [_p("These commands measure the same:")]
        parts += [element("pre", "\n".join(map(shlex.join, commands)))]
    return parts
