"""The robust z-score of each number of a sequence against those before it, in constant memory.

z = (x - median) / (1.4826 MAD), where MAD is the median absolute deviation; for normally distributed numbers this is
the usual z-score, and outliers do not change it. Both medians come from counts in bins on a log scale, so they are
exact to the width of a bin, about one percent.
"""

import math
from typing import Any

import numpy as np

BINS_PER_OCTAVE = 64
SMALLEST, OCTAVES = -20, 60
"""Bins begin at 2^SMALLEST; smaller numbers are counted in the first."""

LEAST = 30
"""Numbers before the first score: with fewer, the medians are too uncertain."""

STALE = 0.01
"""The medians are computed again when the count has grown by this share."""

SIGMA = 1.4826
"""The standard deviation of normal numbers over their MAD."""

LEAST_SPREAD = 0.01
"""Lower bound of the standard deviation as a share of the median, for sequences of mostly equal numbers."""


CENTERS = np.concatenate([[0.0], 2.0 ** (SMALLEST + (np.arange(BINS_PER_OCTAVE * OCTAVES) + 0.5) / BINS_PER_OCTAVE)])
"""The numbers that the bins stand for."""


class RobustScore:
    """Scores a sequence of non-negative numbers, each against those before it."""

    def __init__(self) -> None:
        self._counts = np.zeros(len(CENTERS), dtype=np.int64)
        self._count = 0
        self._taken_at = 0  # the count when the medians were computed
        self._median = self._spread = 0.0

    def add(self, value: float) -> float | None:
        """Return the score of a number, or None after too few numbers, and count it."""
        score = None
        if self._count >= LEAST:
            if self._count >= self._taken_at * (1 + STALE):
                self._take_medians()
            score = (value - self._median) / self._spread
        self._counts[_bin(value)] += 1
        self._count += 1
        return score

    def to_json(self) -> dict[str, Any]:
        """Return the state that later scores depend on."""
        filled = np.flatnonzero(self._counts)
        return {
            "bins": filled.tolist(),
            "counts": self._counts[filled].tolist(),
            "taken_at": self._taken_at,
            "median": self._median,
            "spread": self._spread,
        }

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> "RobustScore":
        score = cls()
        score._counts[np.array(saved["bins"], dtype=np.int64)] = saved["counts"]
        score._count, score._taken_at = int(score._counts.sum()), int(saved["taken_at"])
        score._median, score._spread = float(saved["median"]), float(saved["spread"])
        return score

    def _take_medians(self) -> None:
        self._taken_at = self._count
        filled = np.flatnonzero(self._counts)
        centers, counts = CENTERS[filled], self._counts[filled]
        self._median = _weighted_median(centers, counts)
        distances = np.abs(centers - self._median)
        order = np.argsort(distances, kind="stable")
        mad = _weighted_median(distances[order], counts[order])
        self._spread = max(SIGMA * mad, LEAST_SPREAD * self._median, float(CENTERS[1]))


def _bin(value: float) -> int:
    if value < 2.0**SMALLEST:
        return 0
    return min(1 + int((math.log2(value) - SMALLEST) * BINS_PER_OCTAVE), len(CENTERS) - 1)


def _weighted_median(values: np.ndarray, counts: np.ndarray) -> float:
    """Return the median of sorted values, each of which occurs `counts` times."""
    before = counts.cumsum()
    return float(values[np.searchsorted(before, before[-1] / 2)])
