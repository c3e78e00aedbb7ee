"""Figures as data: panels of lines with bands, error bars and marks.

A report describes its figure by these; `lmlong.report.plot` draws them.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from lmlong.report.table import Value, getter

# colors by Okabe and Ito, which colour-blind readers tell apart; lines also differ in marker and dashes, so that a grey
# print keeps them apart
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#444444", "#e69f00")
DARK_COLORS = ("#56b4e9", "#e69f00", "#22c99a", "#e08bbd", "#eeeeee", "#f0e442")
"""The same on a dark background."""
MARKERS = ("o", "s", "^", "D", "v", "P")
DASHES = ("-", "--", "-.", ":", "-", "--")

Numbers = Sequence[float] | np.ndarray
Dashes = str | tuple[int, tuple[int, int]]
"""A line style of matplotlib."""


class Style(NamedTuple):
    """The color, dashes and marker of one line."""

    color: str | float
    """A color of matplotlib, or a number from 0 to 1 on a scale from dark to light."""
    dashes: Dashes = "-"
    marker: str | None = None
    marker_size: float = 7


def style(number: int) -> Style:
    """Return the style of the n-th line of a plot; from the seventh on colors come again, with other markers."""
    again, look = divmod(number, len(COLORS))
    return Style(COLORS[look], DASHES[look], MARKERS[(look + again) % len(MARKERS)])


class Line(NamedTuple):
    """A line through points."""

    label: str | None
    x: Numbers
    y: Numbers
    style: Style
    low: Numbers | None = None
    """The lower edge of a band around the line."""
    high: Numbers | None = None
    errors: Numbers | None = None
    """The half lengths of error bars."""

    def bounds(self, limits: tuple[float, float]) -> tuple[list[float], list[float]] | None:
        """Return the lower and the upper ends of the band or of the error bars, within limits."""
        if self.errors is not None:
            y, errors = np.asarray(self.y), np.asarray(self.errors)
            low, high = y - errors, y + errors
        elif self.low is not None and self.high is not None:
            low, high = np.asarray(self.low), np.asarray(self.high)
        else:
            return None
        return np.clip(low, *limits).tolist(), np.clip(high, *limits).tolist()


def lines_of(
    groups: Iterable[tuple[str, Sequence[Any]]],
    x: Value,
    y: Value,
    *,
    band: Value | None = None,
    error: Value | None = None,
    marker_size: float = 7,
) -> list[Line]:
    """Return a line for each pair of a name and its rows, the n-th in the n-th style.

    `band` gives the lower and the upper edge of a band, `error` a standard error, of which error bars show two.
    """
    lines = []
    for number, (name, rows) in enumerate(groups):
        xs, ys = ([getter(value)(row) for row in rows] for value in (x, y))
        look = style(number)._replace(marker_size=marker_size)
        low, high = zip(*map(getter(band), rows), strict=True) if band and rows else (None, None)
        bars = None if error is None else [2 * getter(error)(row) for row in rows]
        lines.append(Line(name, xs, ys, look, low, high, bars))
    return lines


class Level(NamedTuple):
    """A horizontal line across a panel, with a name in the legend or a text at its left end."""

    y: float
    style: Style
    label: str | None = None
    text: str = ""
    width: float = 1.5


class Mark(NamedTuple):
    """A vertical line across a panel, with a text above it."""

    x: float
    text: str


class Panel(NamedTuple):
    """Lines over common axes."""

    lines: Sequence[Line]
    title: str = ""
    x_label: str = ""
    y_label: str = ""
    ticks: Sequence[int] = ()
    """The named ticks of a log2 x axis; with none, the axis is linear."""
    tick_name: Callable[[int], str] = str
    levels: Sequence[Level] = ()
    marks: Sequence[Mark] = ()
    shade_from: float | None = None
    """Where a shade begins that reaches to the last tick."""
    y_range: tuple[float | None, float | None] | None = None
    y_limits: tuple[float, float] = (-math.inf, math.inf)
    """The lowest and the highest value that there can be, at which bands and error bars end."""
    least_span: float = 0.0
    """Minimum span of the vertical axis, so that small changes look small."""
    y_scale: Literal["linear", "log", "log 1-2-5"] = "linear"
    """With 1-2-5, the ticks 1, 2 and 5 of each decade are named in full."""
    right_label: str = ""
    """The label of a second y axis on the right, with the ticks of the first; empty for no second axis."""
    right_name: Callable[[float], str] = str
    """The label of each tick of the right axis."""
    note: str = ""
    """Lines of text below the panel."""


class Figure(NamedTuple):
    """Panels in rows."""

    rows: Sequence[Sequence[Panel]]
    size: tuple[float, float]
    """Inches."""
    share_x: bool = False
    """Whether all panels have one x axis, which is labelled in the last row."""
    share_y: bool = False
    """Whether all panels have one y axis, which is labelled in the first column."""
    legend_columns: int = 0
    """Columns of the legend above all panels; 0 for no such legend."""
    legend_row: int | None = None
    """The row whose first panel the legend is of; None for all panels."""

    @property
    def panels(self) -> list[Panel]:
        """The panels of all rows."""
        return [panel for row in self.rows for panel in row]
