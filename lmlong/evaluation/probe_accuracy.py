"""Accuracy of the likeliest token where a text repeats something, by the distance from its first occurrence."""

import math
import re
from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

import numpy as np
import torch

from lmlong.data.token_file import TokenFile
from lmlong.errors import UsageError
from lmlong.evaluation.document_sums import error_of_ratio
from lmlong.evaluation.probes import PROBES, SHORTEST, ProbeText, Trial
from lmlong.evaluation.scorer import TOKENS_AT_ONCE
from lmlong.inference.loading import TrainedLanguageModel
from lmlong.model.language_model import LanguageModel
from lmlong.recipe.lengths import name_length
from lmlong.report.figure import Figure, Level, Panel, Style, lines_of
from lmlong.report.json_values import json_keys
from lmlong.report.progress import Progress
from lmlong.report.report import Report, Table
from lmlong.report.table import Column, format_number, pivot_rows

LENGTHS = (64, 256, 1024, 4096)
"""The default distances."""

TEXTS = 64

CHANCE = Style("0.5", (0, (1, 2)))

TEXT = 100_000
"""Tokens of the held-out text used as filler; longer distances repeat them."""


@json_keys("probe", "distance", "texts", "asked", "right", "accuracy", "error", "chance")
class ProbeScore(NamedTuple):
    """The answers to one probe at one distance."""

    probe: str
    distance: int
    right_by_text: np.ndarray  # (trials,)
    asked_by_text: np.ndarray  # (trials,)
    chance: float
    """Accuracy of the answers of another text of this probe, which is that of a guess; nan if unknown."""

    @property
    def texts(self) -> int:
        return len(self.asked_by_text)

    @property
    def asked(self) -> int:
        return int(self.asked_by_text.sum())

    @property
    def right(self) -> int:
        return int(self.right_by_text.sum())

    @property
    def accuracy(self) -> float:
        return self.right / self.asked

    @property
    def error(self) -> float:
        """Standard error over the texts; half of Wilson's interval where all answers are right or all are wrong, which
        the spread of the texts does not show."""
        if self.right in (0, self.asked):
            return 1 / (self.texts + 1) / 2
        return error_of_ratio(self.right_by_text, self.asked_by_text)


@json_keys("run=name", "trained_length", "recall=scores")
class ProbeResult(NamedTuple):
    """All answers of one model."""

    name: str
    trained_length: int
    scores: list[ProbeScore]

    def chance(self, probe: str) -> float:
        """Return the accuracy of a guess, the mean over all distances, at which guessing is equally hard."""
        levels = [score.chance for score in self.scores if score.probe == probe and not math.isnan(score.chance)]
        return sum(levels) / len(levels) if levels else math.nan


def measure_probes(
    name: str,
    loaded: TrainedLanguageModel,
    text: TokenFile,
    probes: Sequence[str],
    lengths: Sequence[int] = LENGTHS,
    texts: int = TEXTS,
    seed: int = 0,
) -> ProbeResult:
    """Return the number of right answers of a model in `texts` texts each, by probe and by distance in `lengths`."""
    if lengths[0] < SHORTEST:
        raise UsageError(f"--lengths: {lengths[0]} is too short for a probe. Give lengths from {SHORTEST} up.")
    source = _probe_text(loaded, text)
    all_scores = []
    total = len(probes) * texts * sum(lengths)
    with Progress(name, total, "tokens") as progress:
        for probe, distance in product(probes, lengths):
            progress.begin(f"{name}: {probe} at {name_length(distance)}")
            key = (seed, list(PROBES).index(probe), distance)
            trials = (PROBES[probe](source, distance, np.random.default_rng([*key, row])) for row in range(texts))
            right, asked, answers = [], [], []
            for few in _batches(trials):
                for trial, correct in zip(few, answered(loaded.model, few, loaded.tokenizer.bos), strict=True):
                    right.append(correct.sum())
                    asked.append(len(correct))
                    answers.append(trial.tokens[trial.asked])
                progress.update(distance * len(few))
            scores = np.array(right, float), np.array(asked, float)
            all_scores.append(ProbeScore(probe, distance, *scores, chance_of(answers)))
    return ProbeResult(name, loaded.recipe.text.sequence_length, all_scores)


@torch.inference_mode()
def answered(model: LanguageModel, trials: Sequence[Trial], bos: int) -> list[np.ndarray]:
    """Return for each trial whether each answer token is the likeliest one."""
    longest = max(len(trial.tokens) for trial in trials)
    tokens = np.full((len(trials), longest + 1), bos)  # bos comes first
    asked = np.zeros((len(trials), longest), dtype=bool)
    for row, trial in enumerate(trials):
        tokens[row, 1 : len(trial.tokens) + 1] = trial.tokens
        asked[row, trial.asked] = True
    given = torch.from_numpy(tokens).to(model.embedding.weight.device)
    positions = torch.from_numpy(asked).to(given.device)
    correct, state, size = torch.zeros_like(positions), None, model.piece(len(trials))
    for begin in range(0, longest, size):
        end = min(begin + size, longest)
        hidden, state = model(given[:, begin:end], state)
        is_answer = positions[:, begin:end]
        if is_answer.any():
            likeliest = model.logits(hidden[is_answer]).argmax(-1)
            correct[:, begin:end][is_answer] = likeliest == given[:, begin + 1 : end + 1][is_answer]
    return [correct[row][positions[row]].cpu().numpy() for row in range(len(trials))]


def chance_of(answers: Sequence[np.ndarray]) -> float:
    """Return the rate at which two answers have the same token at the same index, over all pairs of answers and all
    indices; nan for a single answer, or if no two agree: chance is lower than what so few answers show."""
    same, pairs = 0.0, 0.0
    for index in range(max(map(len, answers))):
        counts = np.unique([answer[index] for answer in answers if len(answer) > index], return_counts=True)[1]
        same += float((counts * (counts - 1)).sum())
        pairs += float(counts.sum() * (counts.sum() - 1))
    return same / pairs if same else math.nan


def _batches(trials: Iterator[Trial]) -> Iterator[list[Trial]]:
    """Yield the trials in batches of about TOKENS_AT_ONCE tokens."""
    batch: list[Trial] = []
    for trial in trials:
        batch.append(trial)
        if len(batch) * len(trial.tokens) >= TOKENS_AT_ONCE:
            yield batch
            batch = []
    if batch:
        yield batch


def _probe_text(loaded: TrainedLanguageModel, text: TokenFile) -> ProbeText:
    """Return the held-out text without bos and eos, and its words."""
    tokenizer = loaded.tokenizer
    tokens = np.asarray(text.tokens[:TEXT])
    tokens = tokens[tokenizer.token_bytes[tokens] > 0]
    return ProbeText(tokenizer, tokens, sorted(set(re.findall(r"\b[a-z]{4,8}\b", tokenizer.decode(tokens)))))


def recall_report(results: Sequence[ProbeResult]) -> Report:
    """Return a section for each model, with a column for each probe."""
    return Report(list(map(_table, results)), {"runs": results}, lambda: figure(results))


def _table(result: ProbeResult) -> Table:
    probes = list(dict.fromkeys(score.probe for score in result.scores))
    distances = list(dict.fromkeys(score.distance for score in result.scores))
    cells = {
        (score.distance, score.probe): (score.accuracy, format_number(score.error, ".2f").removeprefix("0"))
        for score in result.scores
    }
    columns = [Column("distance", 10, name_length)]
    for probe in probes:
        columns += [Column(probe, 10, ".3f"), Column("±", 4)]
    chance = ["chance", *(cell for probe in probes for cell in (format_number(result.chance(probe), ".4f"), ""))]
    title = f"  how often the likeliest token is the right one, in {result.scores[0].texts:,} texts each"
    return Table(f"{result.name}\n{title}", columns, [*pivot_rows(distances, probes, cells), chance])


def figure(results: Sequence[ProbeResult]) -> Figure:
    """Return the accuracy against the distance, a panel for each probe."""
    probes = list(dict.fromkeys(score.probe for result in results for score in result.scores))
    distances = sorted({score.distance for result in results for score in result.scores})
    panels = []
    for probe in probes:
        groups = [(result.name, [score for score in result.scores if score.probe == probe]) for result in results]
        chance = results[0].chance(probe)
        panels.append(
            Panel(
                lines_of(groups, "distance", "accuracy", error="error"),
                title=probe,
                x_label="tokens back",
                y_label="accuracy, ± 2 standard errors",
                ticks=distances,
                tick_name=name_length,
                y_range=(-0.03, 1.03),
                y_limits=(0.0, 1.0),
                levels=[] if math.isnan(chance) else [Level(chance, CHANCE, text="chance", width=1)],
            )
        )
    return Figure([panels], size=(max(6.4, 3.2 * len(probes)), 4.0), share_y=True, legend_columns=3)
