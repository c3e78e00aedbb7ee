"""What a report says of runs: facts, training metrics, environment and measurements. `run_page` renders it."""

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from lmlong.checkpoint.environment import Environment, read_environment, text_sources
from lmlong.checkpoint.location import run_path
from lmlong.checkpoint.read import read_recipe, reading
from lmlong.errors import LmlongError
from lmlong.evaluation.labels import LabelReport, measure_labels
from lmlong.evaluation.masked import MaskedReport, measure_masked
from lmlong.evaluation.perplexity import MIN_DOCUMENTS, evaluate, validation_text
from lmlong.evaluation.perplexity_report import left_out_lengths
from lmlong.evaluation.probe_accuracy import ProbeResult, measure_probes
from lmlong.evaluation.results import PerplexityReport
from lmlong.evaluation.run_facts import run_facts
from lmlong.inference.classify import TrainedClassifier
from lmlong.inference.loading import TrainedLanguageModel, load, open_run
from lmlong.inference.session import greedy
from lmlong.inference.trained_model import TrainedModel
from lmlong.model.device import describe_machine, synchronize
from lmlong.recipe import Recipe
from lmlong.training.metrics_log import METRICS_FILE, read_entries

T = TypeVar("T")

TARGETS, TOKENS = 6400, 32_768
"""Targets at each context, and tokens of the held-out text: about a minute for the quickstart model on a laptop."""
PROBES, DISTANCES, TRIALS = ("copy", "induction", "mqar"), (64, 256, 1024), 8
WRITTEN, ROUNDS = 64, 3
"""Tokens that are generated to measure the speed, and how often."""


class Measured(NamedTuple):
    """What was measured for the report; None for what could not be."""

    machine: str
    files: Sequence[str | Path]  # none for the held-out text
    tokens: int  # of the text
    perplexity: PerplexityReport | None = None
    recall: ProbeResult | None = None
    masked: MaskedReport | None = None
    labels: LabelReport | None = None
    written_per_second: float | None = None


class ReportedRun(NamedTuple):
    """All that a report says of one run."""

    name: str
    path: str | None  # as it was given, if relative
    recipe: Recipe
    facts: dict[str, Any]  # those of `lmlong info`
    metrics: list[dict[str, Any]]  # of the whole run, also after the step of the checkpoint
    environment: Environment
    measured: Measured | None

    @property
    def left_out(self) -> dict[str, str]:
        """What the run or its text does not allow, by the section of the page that lacks it. Failed measurements are
        not repeated."""
        prediction = self.measured and self.measured.perplexity
        causal = self.recipe.objective == "causal"
        samples = any("sample" in entry for entry in self.metrics)
        option = self.recipe.training.sample_tokens
        why = "no validation wrote one yet" if option else "training.sample_tokens is 0"
        reasons = {
            "Training text": not text_sources(self.environment, self.recipe) and "the run has no record of its text",
            "Training": not any("loss" in entry for entry in self.metrics) and "the run has no training metrics",
            "Samples": causal and not samples and why,
            "Prediction by context": prediction and left_out_lengths(prediction, MIN_DOCUMENTS),
            "State": prediction and not prediction.health and "its norm and denominators need linear attention",
        }
        return {section: reason for section, reason in reasons.items() if reason}


def report_runs(
    runs: Sequence[str | Path],
    files: Sequence[str | Path] = (),
    *,
    measure: bool = True,
    tokens: int = TOKENS,
    device: str = "auto",
) -> list[ReportedRun]:
    """Return what there is to report on each run.

    It is measured as by `lmlong eval`, on up to `tokens` tokens of the held-out text or of `files`.
    Without `measure`, there is only what training has recorded.
    """
    lengths = [reading(run, read_recipe).text.sequence_length for run in runs]
    reported: list[ReportedRun] = []
    for run in runs:
        loaded = _load(run, device)
        name = _new_name(loaded.checkpoint.parents[1].name, [each.name for each in reported])
        facts, recorded = run_facts(loaded), read_entries(loaded.checkpoint.parents[1] / METRICS_FILE)
        environment = read_environment(loaded.checkpoint)
        measured = _measure(name, run, loaded, files, tokens, lengths) if measure else None
        report = ReportedRun(name, _portable(run), loaded.recipe, facts, recorded, environment, measured)
        for section, reason in report.left_out.items():
            print(f"{name}: {section}: left out: {reason}", file=sys.stderr)
        reported.append(report)
    return reported


def _load(run: str | Path, device: str) -> TrainedModel:
    """Load a run of any objective; a language model as it is used."""
    recipe = reading(run, read_recipe)
    return load(run, device) if recipe.objective == "causal" else open_run(run, device)


def _portable(run: str | Path) -> str | None:
    """Return the path of a run if it is relative."""
    path = run_path(run)
    return None if path.is_absolute() else path.as_posix()


def _new_name(name: str, taken: Sequence[str]) -> str:
    """Return the name of a run, with a number if another run has it."""
    numbered = (f"{name} ({number})" for number in range(2, len(taken) + 3))
    return name if name not in taken else next(each for each in numbered if each not in taken)


def _measure(
    name: str, run: str | Path, loaded: TrainedModel, files: Sequence[str | Path], tokens: int, lengths: Sequence[int]
) -> Measured:
    given = (describe_machine(loaded.device), files, tokens)
    if isinstance(loaded, TrainedClassifier):
        return Measured(*given, labels=_attempt(name, lambda: measure_labels(name, loaded, files, tokens)))
    if not isinstance(loaded, TrainedLanguageModel):
        masked = _attempt(name, lambda: measure_masked(name, loaded, files, tokens))
        return Measured(*given, masked=masked)
    speed = _written_per_second(loaded)
    exact = load(run, loaded.device.type, state_dtype="32")  # as `eval` measures

    def perplexity() -> PerplexityReport:
        return evaluate(exact, files or None, name=name, targets=TARGETS, tokens=tokens, trained_lengths=lengths)

    def recall() -> ProbeResult:
        return measure_probes(name, exact, validation_text(exact, files, tokens), PROBES, DISTANCES, TRIALS, seed=0)

    return Measured(*given, _attempt(name, perplexity), _attempt(name, recall), written_per_second=speed)


def _attempt(name: str, measure: Callable[[], T]) -> T | None:
    """Return a measurement; None if the run or its text does not allow it, which is printed."""
    try:
        return measure()
    except LmlongError as error:
        print(f"{name}: not measured: {error}", file=sys.stderr)
        return None


def _written_per_second(loaded: TrainedLanguageModel) -> float:
    """Return the tokens per second of generating one text, after the first step."""
    loaded.use_fast_engine(None)
    seconds, start = [], greedy(loaded.model, loaded.read(""), 1)
    for _ in range(ROUNDS):
        begun = time.perf_counter()
        greedy(loaded.model, start, WRITTEN)
        synchronize(loaded.device)
        seconds.append(time.perf_counter() - begun)
    return WRITTEN / statistics.median(seconds)
