"""Planted anomalies of a log, found by what its lines cost a model, by their length, and by the rarity of templates."""

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from lmlong.inference.loading import TrainedLanguageModel
from lmlong.model.language_model import PIECE
from lmlong.surprisal.robust_score import RobustScore
from lmlong.surprisal.stream import score
from planted_parts.anomaly_ranking import Alarms, Curve, alarms_above, curve_of
from planted_parts.service_log import ServiceLog

MASKED = re.compile(r"\b(?=[a-z]*\d)[0-9a-f]{6}\b|\d+")
"""Request ids, and numbers."""


class Found(NamedTuple):
    """What one method finds."""

    method: str
    scores: np.ndarray  # of each line, nan where there is none
    curve: Curve
    alarms: list[Alarms]  # at the given thresholds, if they are meant for it, and at the best one


def by_surprise(loaded: TrainedLanguageModel, log: ServiceLog) -> dict[str, np.ndarray]:
    """Return z of each line, as `lmlong score --by line` tells it, that of its bits per byte, and that of its bits."""
    lines = list(score(loaded, log.text))
    assert [line.number for line in lines] == list(range(1, len(log.lines) + 1))
    return {
        "z": np.array([np.nan if line.z is None else line.z for line in lines]),
        "bits per byte": _robust(RobustScore(), (line.bits_per_byte or 0.0 for line in lines)),
        "bits": _robust(RobustScore(), (line.bits for line in lines)),
    }


@torch.inference_mode()
def bits_above_entropy(loaded: TrainedLanguageModel, log: ServiceLog) -> np.ndarray:
    """Return by how much the bits of each line exceed what the model itself expects of them: the sum of -log2 p of its
    tokens, less the entropy of their distributions. What is random in every line, such as an id, adds nothing. A token
    that goes on in the next line is of the first."""
    model, tokenizer = loaded.model, loaded.tokenizer
    ids = torch.tensor([tokenizer.bos, *tokenizer.encode(log.text)], device=loaded.device)
    state, excess = None, []
    for begin in range(0, len(ids) - 1, PIECE):
        tokens = ids[begin : begin + PIECE + 1]
        hidden, state = model.hidden_states(tokens[None, :-1], state)
        log_p = model.logits(hidden[0]).double().log_softmax(-1)
        entropy = -(log_p.exp() * log_p).sum(-1)
        excess.append(-log_p.gather(-1, tokens[1:, None])[:, 0] - entropy)
    sizes = tokenizer.token_bytes[ids[1:].cpu().numpy()]
    ends = np.cumsum([len(line.encode()) + 1 for line in log.lines])
    lines = np.searchsorted(ends, np.cumsum(sizes) - sizes, side="right")
    return np.bincount(lines, torch.cat(excess).cpu().numpy() / math.log(2), minlength=len(ends))


def by_length(log: ServiceLog) -> np.ndarray:
    """Return how far the length of each line is from the median of those before, in robust standard deviations."""
    return np.abs(_robust(RobustScore(), (float(len(line.encode())) for line in log.lines)))


def by_rarity(log: ServiceLog, normal: Iterable[str]) -> np.ndarray:
    """Return -log2 of the share of lines that had the same template, among the normal lines and those so far."""
    counts = Counter(map(template, normal))
    total, found = sum(counts.values()), []
    for line in log.lines:
        found.append(np.log2(total + 1) - np.log2(counts[template(line)] + 1))
        counts[template(line)] += 1
        total += 1
    return np.array(found)


def template(line: str) -> str:
    """Return a line with `#` for each number and request id."""
    return MASKED.sub("#", line)


def _robust(scores: RobustScore, values: Iterable[float]) -> np.ndarray:
    return np.array([np.nan if z is None else z for z in map(scores.add, values)])


def compare_methods(
    models: dict[str, TrainedLanguageModel], log: ServiceLog, normal: Sequence[str], above: Sequence[float]
) -> list[Found]:
    """Return what each model finds at thresholds of z and at the best one, and what the baselines find."""
    found = []
    for name, loaded in models.items():
        for unit, scores in by_surprise(loaded, log).items():
            found.append(_found(f"{name}, {unit}", scores, log, above if unit == "z" else ()))
        found.append(_found(f"{name}, above entropy", bits_above_entropy(loaded, log), log, ()))
    found.append(_found("length of the line", by_length(log), log, ()))
    found.append(_found("rarity of the template", by_rarity(log, normal), log, ()))
    return found


def _found(method: str, scores: np.ndarray, log: ServiceLog, above: Sequence[float]) -> Found:
    curve = curve_of(scores, log.planted)
    return Found(method, scores, curve, [alarms_above(scores, log.planted, each) for each in (*above, curve.best)])
