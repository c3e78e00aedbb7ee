"""How well the scores of a log's lines find its planted anomalies: precision and recall at a threshold, and over all.

An alarm is a line with a score at or above the threshold. Precision is the share of alarms that are lines of an
anomaly; recall is the share of anomalies with an alarm in any of their lines.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from planted_parts.service_log import Planted


class Alarms(NamedTuple):
    """What a threshold finds."""

    above: float
    alarms: int
    right: int  # alarms that are lines of an anomaly
    found: int  # anomalies
    planted: int
    by_kind: dict[str, float]  # recall

    @property
    def precision(self) -> float:
        return self.right / self.alarms if self.alarms else 1.0

    @property
    def recall(self) -> float:
        return self.found / self.planted

    @property
    def f1(self) -> float:
        return 2 * self.precision * self.recall / (self.precision + self.recall) if self.found else 0.0


class Curve(NamedTuple):
    """Precision and recall at each score as threshold, from the highest on."""

    above: np.ndarray
    precision: np.ndarray
    recall: np.ndarray

    @property
    def average_precision(self) -> float:
        """The precision at each further anomaly that is found, averaged over all anomalies, found or not."""
        return float((self.precision * np.diff(self.recall, prepend=0)).sum())

    @property
    def best(self) -> float:
        """The threshold with the highest F1: what a user could at best choose, who knows the anomalies."""
        f1 = 2 * self.precision * self.recall / np.maximum(self.precision + self.recall, 1e-9)
        return float(self.above[f1.argmax()])


def alarms_above(scores: np.ndarray, planted: Sequence[Planted], above: float) -> Alarms:
    """Return what a threshold finds; lines are numbered from 1 in `planted`, and their scores stand in order."""
    alarm = scores >= above
    found = [bool(alarm[one.first - 1 : one.last].any()) for one in planted]
    kinds = {
        kind: float(np.mean([yes for one, yes in zip(planted, found, strict=True) if one.kind == kind]))
        for kind in dict.fromkeys(one.kind for one in planted)
    }
    right = int((alarm & anomalous(len(scores), planted)).sum())
    return Alarms(above, int(alarm.sum()), right, sum(found), len(planted), kinds)


def anomalous(lines: int, planted: Sequence[Planted]) -> np.ndarray:
    """Return of each line whether it belongs to an anomaly."""
    found = np.zeros(lines, dtype=bool)
    for one in planted:
        found[one.first - 1 : one.last] = True
    return found


def curve_of(scores: np.ndarray, planted: Sequence[Planted]) -> Curve:
    """Return precision and recall at every threshold; lines without a score, nan, never alarm."""
    thresholds = np.unique(scores[~np.isnan(scores)])[::-1]
    best = np.sort([np.nanmax(np.append(scores[one.first - 1 : one.last], -np.inf)) for one in planted])
    normal, right = (np.sort(scores[kept & ~np.isnan(scores)]) for kept in _both(anomalous(len(scores), planted)))
    hits, misses, found = (len(some) - np.searchsorted(some, thresholds) for some in (right, normal, best))
    return Curve(thresholds, hits / (hits + misses), found / len(planted))


def _both(yes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return ~yes, yes
