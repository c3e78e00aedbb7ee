"""Perplexity against length as a plot: a panel for each view."""

from collections.abc import Sequence
from typing import Any

from lmlong.evaluation import context_views_report
from lmlong.evaluation.results import PerplexityReport
from lmlong.evaluation.sums_report import line
from lmlong.recipe.lengths import name_length
from lmlong.report.figure import Figure, Level, Line, Mark, Panel, Style, style

PANELS_IN_A_ROW = 3


def figure(reports: Sequence[PerplexityReport]) -> Figure:
    """Describe bits per byte against context, position and window, with bands of two standard errors.

    All contexts have the same targets, so an error in the height of that line shifts all of it alike: its band is that
    of the change from the shortest context.
    """
    panels = [
        _panel(reports, label, describe)
        for view, describe, label in (
            ("context", _context_lines, "tokens read before the same targets\n(band: the change from the shortest)"),
            ("position", _position_lines, "tokens before, read from the beginning"),
            ("windows", _window_lines, "tokens in a window"),
        )
        if any(getattr(report, view) for report in reports)
    ]
    if panels:
        panels[0] = panels[0]._replace(y_label="bits per byte, ± 2 standard errors")
    panels += context_views_report.panels(reports)
    rows = [panels[first : first + PANELS_IN_A_ROW] for first in range(0, len(panels), PANELS_IN_A_ROW)]
    return Figure(rows, size=(max(6.4, 4.6 * len(rows[0])), 4.4 * len(rows)), legend_columns=3)


def _panel(reports: Sequence[PerplexityReport], label: str, describe: Any) -> Panel:
    """Describe one view of all runs, with a mark at each length that a run was trained at and a shade beyond them."""
    lines, levels = [], []
    for number, report in enumerate(reports):
        more_lines, more_levels = describe(report, style(number))
        lines += more_lines
        levels += more_levels
    ticks = sorted({int(x) for line in lines for x in line.x})
    trained = sorted({report.trained_length for report in reports})
    inside = [length for length in trained if ticks[0] <= length <= ticks[-1]]
    return Panel(
        lines,
        x_label=label,
        ticks=ticks,
        tick_name=name_length,
        levels=levels,
        marks=[Mark(length, f"trained at {name_length(length)}") for length in inside],
        shade_from=trained[-1] if ticks[0] <= trained[-1] < ticks[-1] else None,
    )


Lines = tuple[list[Line], list[Level]]


def _context_lines(report: PerplexityReport, style: Style) -> Lines:
    points = [(length, sums) for length, sums, _ in report.context]
    errors = [sums.bits_error_from(points[0][1]) for _, sums in points]
    return [line(report.name, points, style, errors)], []


def _position_lines(report: PerplexityReport, style: Style) -> Lines:
    return [line(report.name, [(first, sums) for first, _, sums in report.position], style)], []


def _window_lines(report: PerplexityReport, style: Style) -> Lines:
    """Describe windows that reset (filled) and slide (hollow), and the loss with a carried state as a level."""
    reset = line(f"{report.name}, reset", [(length, sums) for length, sums, _ in report.windows], style)
    hollow = style._replace(hollow=True)
    sliding = line(f"{report.name}, sliding", [(length, sums) for length, _, sums in report.windows], hollow)
    if not report.carried or not report.windows:
        return [reset, sliding], []
    dotted = Style(style.color, (0, (1, 2)))
    return [reset, sliding], [Level(report.carried.totals.bits_per_byte, dotted, text="carried", width=1)]
