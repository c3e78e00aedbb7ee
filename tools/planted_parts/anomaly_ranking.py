"""Precision and recall of the scores of a log's lines for its planted anomalies, at one threshold and at all.

An alarm is a line with a score at or above the threshold. Precision is the share of alarms that are lines of an
anomaly; recall is the share of anomalies with an alarm in any of their lines.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from planted_parts.service_log import Planted


class Alarms(NamedTuple):
    """The alarms at one threshold."""

    above: float
    alarms: int
    right: int  # alarms that are lines of an anomaly
    found: int  # anomalies with an alarm
    planted: int  # anomalies
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
    """Precision and recall at each score as threshold, in descending order."""

    above: np.ndarray
    precision: np.ndarray
    recall: np.ndarray

    @property
    def average_precision(self) -> float:
        """The mean over all anomalies of the precision at which each is found, 0 for those that are not."""
        return float((self.precision * np.diff(self.recall, prepend=0)).sum())

    @property
    def best(self) -> float:
        """The threshold with the highest F1, which only a user who knows the anomalies could choose."""
        f1 = 2 * self.precision * self.recall / np.maximum(self.precision + self.recall, 1e-9)
        return float(self.above[f1.argmax()])


def alarms_above(scores: np.ndarray, planted: Sequence[Planted], above: float) -> Alarms:
    """Return the alarms at a threshold; `scores` are in the order of lines, which `planted` counts from 1."""
    alarm = scores >= above
    found = [bool(alarm[anomaly.first - 1 : anomaly.last].any()) for anomaly in planted]
    kinds = {
        kind: float(
            np.mean([is_found for anomaly, is_found in zip(planted, found, strict=True) if anomaly.kind == kind])
        )
        for kind in dict.fromkeys(anomaly.kind for anomaly in planted)
    }
    right = int((alarm & anomalous(len(scores), planted)).sum())
    return Alarms(above, int(alarm.sum()), right, sum(found), len(planted), kinds)


def anomalous(lines: int, planted: Sequence[Planted]) -> np.ndarray:
    """Return for each line whether it belongs to an anomaly."""
    in_anomaly = np.zeros(lines, dtype=bool)
    for anomaly in planted:
        in_anomaly[anomaly.first - 1 : anomaly.last] = True
    return in_anomaly


def curve_of(scores: np.ndarray, planted: Sequence[Planted]) -> Curve:
    """Return precision and recall at every threshold; a line without a score (nan) is never an alarm."""
    thresholds = np.unique(scores[~np.isnan(scores)])[::-1]
    highest = np.sort([np.nanmax(np.append(scores[anomaly.first - 1 : anomaly.last], -np.inf)) for anomaly in planted])
    in_anomaly, scored = anomalous(len(scores), planted), ~np.isnan(scores)
    right, wrong = np.sort(scores[in_anomaly & scored]), np.sort(scores[~in_anomaly & scored])
    hits, misses, found = (len(each) - np.searchsorted(each, thresholds) for each in (right, wrong, highest))
    return Curve(thresholds, hits / (hits + misses), found / len(planted))
