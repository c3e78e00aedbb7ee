"""Perplexity against length as a plot: a panel for each view."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from lmlong.evaluation.document_sums import Estimate
from lmlong.evaluation.perplexity_report import format_perplexity
from lmlong.evaluation.results import AtLength, PerplexityReport
from lmlong.recipe.lengths import name_length
from lmlong.report.figure import Figure, Line, Mark, Panel, Style, line_with_errors, style

LEAST_SPAN = 0.02
"""Bits per byte that the vertical axis spans at least, so that less than a hundredth does not look like a trend."""

OF_CONTEXT = "tokens read before the same targets\n(band: the change from the shortest)"


def figure(reports: Sequence[PerplexityReport]) -> Figure:
    """Return bits per byte against context and position, with bands of two errors; by context beside the perplexity."""
    panels = [
        *(_with_perplexity(panel, reports) for panel in _panels(reports, _context, "by context", OF_CONTEXT)),
        *_panels(reports, _position, "by position", "tokens before, read from the beginning"),
    ]
    return Figure([panels], size=(max(6.4, 4.6 * len(panels)), 4.4), legend_columns=3)


def _panels(
    reports: Sequence[PerplexityReport],
    describe: Callable[[PerplexityReport, Style], Line],
    title: str,
    x_label: str,
) -> list[Panel]:
    """Return the panel of one view of all runs, or none if no run has it."""
    lines = [describe(report, style(number)) for number, report in enumerate(reports)]
    lines = [line for line in lines if len(line.x)]
    ticks = sorted({int(x) for line in lines for x in line.x})
    panel = Panel(
        lines,
        title,
        x_label,
        "bits per byte, ± 2 standard errors",
        ticks=ticks,
        tick_name=name_length,
        y_limits=(0.0, math.inf),
        least_span=LEAST_SPAN,
    )
    return [_with_trained_lengths(panel, reports)] if lines else []


def _with_trained_lengths(panel: Panel, reports: Sequence[PerplexityReport]) -> Panel:
    """Return a panel with a mark at each length that a run was trained at, and a shade beyond all of them."""
    first, last = panel.ticks[0], panel.ticks[-1]
    trained = sorted({report.trained_length for report in reports})
    return panel._replace(
        marks=[Mark(length, f"trained at {name_length(length)}") for length in trained if first <= length <= last],
        shade_from=trained[-1] if first <= trained[-1] < last else None,
    )


def _with_perplexity(panel: Panel, reports: Sequence[PerplexityReport]) -> Panel:
    """Return a panel of bits per byte with an axis of the perplexity, if one holds for all runs: their targets have the
    same number of bytes per token."""
    first, *rest = [point.sums.totals for report in reports for point in report.context]
    if any(each.bytes * first.tokens != first.bytes * each.tokens for each in rest):
        return panel

    def perplexity(bits: float) -> str:
        return format_perplexity(replace(first, nats=bits * first.bytes * math.log(2)).perplexity)

    return panel._replace(right_label="perplexity", right_name=perplexity)


def _context(report: PerplexityReport, look: Style) -> Line:
    """Return bits per byte by context. All contexts have the same targets, so an error in the height of the line shifts
    all of it alike: its band is that of the change from the shortest context."""

    def estimate(point: AtLength) -> Estimate:
        return Estimate(point.sums.totals.bits_per_byte, point.sums.bits_error_from(report.context[0].sums))

    return line_with_errors(report.name, report.context, "length", estimate, look)


def _position(report: PerplexityReport, look: Style) -> Line:
    return line_with_errors(report.name, report.position, "first", "sums.per_byte", look)
