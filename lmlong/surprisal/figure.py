"""A plot of surprisal along a text, from units as they are scored, in constant memory."""

from typing import NamedTuple

import numpy as np

from lmlong.report.figure import Figure, Line, Mark, Panel, style
from lmlong.surprisal.units import Surprise

STRETCHES = 256
"""The largest number of stretches in the plot; a long text has at least half of them."""

MARKED = 6
"""The number of unusual units that are marked."""

APART = 40
"""Marks are at least 1 / APART of the text apart, so that their numbers are legible."""

SHOWN = 90
"""Characters of a marked unit."""


LEGIBLE = 12
"""Characters of a unit that is preferred for a mark: an unusual empty line would show no reason."""


class Along(NamedTuple):
    """The most unusual unit of a stretch."""

    legible: bool
    z: float
    offset: int  # bytes before it, of all texts
    text: str


class SurpriseAlong:
    """Bits and bytes of equal stretches of all texts; if there are too many, pairs of neighbours are merged."""

    def __init__(self) -> None:
        self._size = 1  # bytes of a stretch
        self._bits, self._bytes = np.zeros(STRETCHES), np.zeros(STRETCHES)
        self._most: list[Along | None] = [None] * STRETCHES
        self._offset = 0

    def add(self, unit: Surprise) -> None:
        while self._offset // self._size >= STRETCHES:
            self._halve()
        at = self._offset // self._size
        self._bits[at] += unit.bits
        self._bytes[at] += unit.bytes
        most = self._most[at]
        if unit.z is not None:
            unusual = Along(len(unit.text.strip()) >= LEGIBLE, unit.z, self._offset, unit.text)
            self._most[at] = max(unusual, most) if most else unusual
        self._offset += unit.bytes

    def figure(self, name: str) -> Figure:
        """Return bits per byte along the text, and the most unusual unit of each stretch."""
        filled = self._bytes > 0
        position = (np.flatnonzero(filled) + 0.5) * self._size / 1000
        bits, sizes = self._bits[filled], self._bytes[filled]
        lines = [
            Line("of a stretch", position, bits / sizes, style(0)._replace(marker=None)),
            Line("so far", position, bits.cumsum() / sizes.cumsum(), style(1)._replace(marker=None)),
        ]
        along = Panel(lines, title=f"{name}: surprisal along the text", y_label="bits per byte")
        scored = [(at, most.z) for at, most in enumerate(self._most) if most]
        where, highest = np.array(scored).reshape(-1, 2).T
        unusual = Line(None, (where + 0.5) * self._size / 1000, highest, style(0)._replace(marker=None))
        marked = self._marked()
        marks = [Mark(unit.offset / 1000, str(number)) for number, unit in enumerate(marked, 1)]
        texts = [f"{number}  {_short(unit.text)}" for number, unit in enumerate(marked, 1)]
        below = Panel(
            [unusual],
            x_label="kB of text",
            note="\n".join(texts),
            y_label="z of the most unusual\nunit of a stretch",
            marks=marks,
        )
        return Figure([[along], [below]], (11, 7), share_x=True, legend_columns=2)

    def _marked(self) -> list[Along]:
        """Return the most unusual units in descending order of z, which are APART."""
        marked: list[Along] = []
        for unit in sorted(filter(None, self._most), reverse=True):
            if all(abs(unit.offset - other.offset) * APART >= self._offset for other in marked):
                marked.append(unit)
        return marked[:MARKED]

    def _halve(self) -> None:
        for values in (self._bits, self._bytes):
            values[: STRETCHES // 2] = values.reshape(-1, 2).sum(1)
            values[STRETCHES // 2 :] = 0
        pairs = zip(self._most[::2], self._most[1::2], strict=True)
        self._most = [max(filter(None, pair), default=None) for pair in pairs] + [None] * (STRETCHES // 2)
        self._size *= 2


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= SHOWN else line[: SHOWN - 1] + "…"
