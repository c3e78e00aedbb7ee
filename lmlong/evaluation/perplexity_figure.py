"""Perplexity against length as a plot: a panel for each view."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from lmlong.evaluation.document_sums import Estimate
from lmlong.evaluation.recurrence import BUCKETS, KINDS, Kind
from lmlong.evaluation.results import AtLength, AtRecurrence, PerplexityReport, gain_by
from lmlong.recipe.lengths import name_length
from lmlong.report.figure import Figure, Level, Line, Mark, Panel, Style, line_with_errors, style

PANELS_IN_A_ROW = 3

OF_LOSS: dict[str, Any] = {"small": True, "y_limits": (0.0, math.inf), "least_span": 0.02}
"""How panels show bits per byte: less than a hundredth does not look like a trend."""


def figure(reports: Sequence[PerplexityReport]) -> Figure:
    """Return bits per byte against context, position and window, then the other views, with bands of two errors."""
    panels = [
        _with_trained_lengths(panel, reports)._replace(title=title, **OF_LOSS)
        for title, describe, x_label in (
            ("by context", _context, "tokens read before the same targets\n(band: the change from the shortest)"),
            ("by position", _position, "tokens before, read from the beginning"),
            ("by window", _windows, "tokens in a window"),
        )
        for panel in _panels(reports, describe, x_label, "bits per byte, ± 2 standard errors")
    ]
    if carried := list(_carried(reports)):
        panels[-1] = panels[-1]._replace(levels=carried)
    for report in reports:
        if len(report.recurrence) > 1:
            panels += [_recurrence(report, kind, f"{report.name}: " if len(reports) > 1 else "") for kind in KINDS]
    divergence = _panels(reports, _divergence, "tokens back to a point", "KL without the text before it, nats/token")
    panels += [panel._replace(y_limits=(0.0, math.inf)) for panel in divergence]
    hollow = "nats/token that counts add\n(hollow: of all tokens before)"
    panels += _panels(reports, _cache, "tokens read before the same targets", hollow)
    rows = [panels[first : first + PANELS_IN_A_ROW] for first in range(0, len(panels), PANELS_IN_A_ROW)]
    return Figure(rows, size=(max(6.4, 4.6 * len(rows[0])), 4.4 * len(rows)), legend_columns=3)


Describe = Callable[[PerplexityReport, Style], Iterator[Line]]
"""Yields the lines of one view of a report."""


def _panels(reports: Sequence[PerplexityReport], describe: Describe, x_label: str, y_label: str = "") -> list[Panel]:
    """Return the panel of one view of all runs, or none if no run has it."""
    lines = [line for number, report in enumerate(reports) for line in describe(report, style(number)) if len(line.x)]
    return [_panel(lines, x_label, y_label)] if lines else []


def _panel(lines: Sequence[Line], x_label: str, y_label: str) -> Panel:
    ticks = sorted({int(x) for line in lines for x in line.x})
    return Panel(lines, x_label=x_label, y_label=y_label, ticks=ticks, tick_name=name_length)


def _with_trained_lengths(panel: Panel, reports: Sequence[PerplexityReport]) -> Panel:
    """Return a panel with a mark at each length that a run was trained at, and a shade beyond all of them."""
    first, last = panel.ticks[0], panel.ticks[-1]
    trained = sorted({report.trained_length for report in reports})
    return panel._replace(
        marks=[Mark(length, f"trained at {name_length(length)}") for length in trained if first <= length <= last],
        shade_from=trained[-1] if first <= trained[-1] < last else None,
    )


def _context(report: PerplexityReport, look: Style) -> Iterator[Line]:
    """Yield bits per byte by context. All contexts have the same targets, so an error in the height of the line shifts
    all of it alike: its band is that of the change from the shortest context."""

    def estimate(point: AtLength) -> Estimate:
        return Estimate(point.sums.totals.bits_per_byte, point.sums.bits_error_from(report.context[0].sums))

    yield line_with_errors(report.name, report.context, "length", estimate, look)


def _position(report: PerplexityReport, look: Style) -> Iterator[Line]:
    yield line_with_errors(report.name, report.position, "first", "sums.per_byte", look)


def _windows(report: PerplexityReport, look: Style) -> Iterator[Line]:
    """Yield windows that reset (filled) and that slide (hollow)."""
    for way, hollow in (("reset", False), ("sliding", True)):
        label = f"{report.name}, {way}"
        yield line_with_errors(label, report.windows, "length", f"{way}.per_byte", look._replace(hollow=hollow))


def _carried(reports: Sequence[PerplexityReport]) -> Iterator[Level]:
    """Yield the loss of each run with a carried state, as a level among its windows."""
    for number, report in enumerate(reports):
        if report.carried and report.windows:
            dotted = Style(style(number).color, (0, (1, 2)))
            yield Level(report.carried.totals.bits_per_byte, dotted, text="carried", width=1)


def _recurrence(report: PerplexityReport, kind: Kind, run: str) -> Panel:
    """Return the change of each bucket's loss from the shortest length."""
    shortest = report.recurrence[0]

    def change_of(bucket: str) -> Callable[[AtRecurrence], Estimate]:
        return lambda point: point.changes(kind, shortest)[bucket].nats

    lines = [
        line_with_errors(name, report.recurrence, "length", change_of(name), style(number))
        for number, (name, sums) in enumerate(zip(BUCKETS, getattr(shortest, kind), strict=True))
        if sums.totals.tokens
    ]
    panel = _panel(lines, "tokens read before the same targets", "change in nats/token")
    return panel._replace(title=f"{run}same {kind} last seen", small=True, legend=True)


def _divergence(report: PerplexityReport, look: Style) -> Iterator[Line]:
    yield line_with_errors(report.name, report.remembrance, "length", "sums.per_token", look)


def _cache(report: PerplexityReport, look: Style) -> Iterator[Line]:
    """Yield the gain by bigrams and trigrams, of the context (filled) and of the document (hollow)."""
    for name, hollow in (("context", False), ("document", True)):
        label = None if hollow else report.name
        yield line_with_errors(label, report.cache, "length", gain_by(name), look._replace(hollow=hollow))
