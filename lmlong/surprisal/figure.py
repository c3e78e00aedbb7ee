"""A picture of surprise along a text, from units as they come, in constant memory."""

from typing import NamedTuple

import numpy as np

from lmlong.report.figure import Figure, Line, Mark, Panel, style
from lmlong.surprisal.units import Surprise

STRETCHES = 256
"""Stretches that a text is drawn in, at most; half of them at least once it is long."""

MARKED = 6
"""The most unusual units that are marked."""

APART = 40
"""Marks are at least this part of the text apart, so that their numbers can be read."""

SHOWN = 90
"""Characters of a marked unit."""


LEGIBLE = 12
"""Characters of a unit that is drawn rather than shorter ones: an empty line may be strange, but tells nobody why."""


class Along(NamedTuple):
    """The most unusual unit of a stretch."""

    legible: bool
    z: float
    place: int  # bytes before it, of all texts
    text: str


class SurpriseAlong:
    """Bits and bytes of even stretches of all that was scored: where there are too many, two become one."""

    def __init__(self) -> None:
        self._size = 1  # bytes of a stretch
        self._bits, self._bytes = np.zeros(STRETCHES), np.zeros(STRETCHES)
        self._most: list[Along | None] = [None] * STRETCHES
        self._place = 0

    def add(self, unit: Surprise) -> None:
        while self._place // self._size >= STRETCHES:
            self._halve()
        at = self._place // self._size
        self._bits[at] += unit.bits
        self._bytes[at] += unit.bytes
        most = self._most[at]
        if unit.z is not None:
            found = Along(len(unit.text.strip()) >= LEGIBLE, unit.z, self._place, unit.text)
            self._most[at] = max(found, most) if most else found
        self._place += unit.bytes

    def figure(self, name: str) -> Figure:
        """Return bits per byte along the text, and the most unusual unit of each stretch."""
        filled = self._bytes > 0
        place = (np.flatnonzero(filled) + 0.5) * self._size / 1000
        bits, sizes = self._bits[filled], self._bytes[filled]
        lines = [
            Line("of a stretch", place, bits / sizes, style(0)._replace(marker=None)),
            Line("so far", place, bits.cumsum() / sizes.cumsum(), style(1)._replace(marker=None)),
        ]
        along = Panel(lines, title=f"{name}: surprise along the text", y_label="bits per byte", legend=True)
        scored = [(at, most.z) for at, most in enumerate(self._most) if most]
        where, highest = np.array(scored).reshape(-1, 2).T
        unusual = Line(None, (where + 0.5) * self._size / 1000, highest, style(0)._replace(marker=None))
        marked = self._marked()
        marks = [Mark(found.place / 1000, str(number), "above") for number, found in enumerate(marked, 1)]
        told = [f"{number}  {_short(found.text)}" for number, found in enumerate(marked, 1)]
        below = Panel(
            [unusual],
            x_label="\n".join(["kB of text", *told]),
            y_label="z of the most unusual\nunit of a stretch",
            marks=marks,
        )
        return Figure([[along], [below]], (11, 7), share_x=True)

    def _marked(self) -> list[Along]:
        """Return the most unusual units, the most unusual first, none beside another."""
        marked: list[Along] = []
        for found in sorted(filter(None, self._most), reverse=True):
            if all(abs(found.place - other.place) * APART >= self._place for other in marked):
                marked.append(found)
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
    shown = line if len(line) <= SHOWN else line[: SHOWN - 1] + "…"
    return shown.replace("$", r"\$")  # which would begin a formula
