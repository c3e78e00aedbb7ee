"""The approximation study as a table, as JSON and as a plot."""

from collections.abc import Sequence
from typing import Any, get_args

from lmlong.experiments.approximation import FeatureError, Form, approximation_cases
from lmlong.report.figure import COLORS, MARKERS, Figure, Line, Panel, Style
from lmlong.report.json_values import json_values
from lmlong.report.table import Column, format_table

DRAWN_DEVIATIONS = (0.25, 0.5, 1.0, 1.5)
HIGHEST = 3.0
"""Larger errors leave the plot: at 1 the approximation is worth no more than answering 0."""

COLUMNS = [
    Column("width", 5),
    Column("inputs", 8, ".2f"),
    Column("positive", 10, ".3f"),
    Column("hyperbolic", 11, ".3f"),
    Column("trig", 8),
    Column("  winner", 13, align="<"),
    Column("gain", 6, ".3f"),
    Column("fixed", 8, ".3f"),
    Column("quantile", 10, ".3f"),
]


def table(results: Sequence[FeatureError]) -> str:
    """Return for an 80-column terminal where each form wins, and the effect of orthogonal rows and of their norms."""
    most = max(result.setting.features for result in results)
    rows = [
        [
            case.width,
            case.deviation,
            case.forms["positive"],
            case.forms["hyperbolic"],
            _short(case.forms["trig"]),
            f"  {case.winner}",
            case.gain,
            case.norms["fixed"],
            case.norms["quantile"],
        ]
        for case in approximation_cases(results)
    ]
    lines = [
        f"relative error of causal attention with {most} features, median over the seeds",
        "",
        f"{'':14}{'orthogonal rows, chi norms':<34}{'':6}positive, orthogonal",
        *format_table(COLUMNS, rows),
        "",
        "gain: error of independent rows over that of orthogonal ones, positive, chi;",
        "      the median over all numbers of features",
    ]
    return "\n".join(lines)


def _short(error: float) -> str:
    return f"{error:.3f}" if error < 1000 else f"{error:.0e}"


def to_json(results: Sequence[FeatureError]) -> list[dict[str, Any]]:
    """Return every setting with its median error and quartiles."""
    return json_values(
        [
            {**r.setting._asdict(), "median": r.median, "lower_quartile": r.lower, "upper_quartile": r.upper}
            for r in results
        ]
    )


def figure(results: Sequence[FeatureError]) -> Figure:
    """Describe error against number of features: a row for each width, a column for some deviations."""
    widths = sorted({result.setting.width for result in results})
    deviations = sorted({result.setting.deviation for result in results})
    deviations = [value for value in deviations if value in DRAWN_DEVIATIONS] or deviations
    rows = [[_panel(results, width, deviation) for deviation in deviations] for width in widths]
    for row in rows:
        row[0] = row[0]._replace(y_label="relative error")
    rows[-1] = [panel._replace(x_label="features") for panel in rows[-1]]
    size = (2.3 * len(deviations) + 0.8, 2.6 * len(widths) + 0.6)
    return Figure(rows, size, share_x=True, share_y=True, legend_columns=3)


def _panel(results: Sequence[FeatureError], width: int, deviation: float) -> Panel:
    """Describe a line for each form with orthogonal rows, with a band of quartiles, and one with independent rows."""
    lines = []
    for number, form in enumerate(get_args(Form)):
        for orthogonal in (True, False):
            wanted = (width, deviation, form, orthogonal, "chi")
            found = [r for r in results if (*r.setting[:2], *r.setting[3:]) == wanted]
            color, marker = COLORS[number], MARKERS[number]
            lines.append(
                Line(
                    f"{form}, {'orthogonal' if orthogonal else 'independent'}",
                    [r.setting.features for r in found],
                    [r.median for r in found],
                    Style(color, "-", marker, marker_size=5) if orthogonal else Style(color, ":"),
                    [r.lower for r in found] if orthogonal else None,
                    [r.upper for r in found] if orthogonal else None,
                )
            )
    return Panel(
        lines,
        title=f"width {width}, deviation {deviation:g}",
        ticks=sorted({result.setting.features for result in results}),
        small=True,
        y_range=(None, HIGHEST),
        y_scale="log",
    )
