"""Panels as pictures of an HTML page, each with its numbers as a text and as a table."""

import math
import re
from collections.abc import Sequence

from lmlong.report.figure import COLORS, Figure, Panel
from lmlong.report.html import Html, data_table, details, element
from lmlong.report.plot import svg
from lmlong.report.report import Table
from lmlong.report.table import Column

WIDTH, HEIGHT, LEGEND_ROW = 5.0, 3.0, 0.24
"""Inches of a picture, and of each line of the legend above it."""

VARIABLES = {
    **{color: f"var(--c{number})" for number, color in enumerate(COLORS)},
    "#000000": "var(--text)",
    "#595959": "var(--faint)",
    "#808080": "var(--faint)",
    "#999999": "var(--faint)",
    "#e6e6e6": "var(--line)",
    "#f2f2f2": "var(--shade)",
    "#ffffff": "var(--back)",
}
"""The colors of a plot, as the style of the page names them; they follow the reader's light or dark screen."""

NOISE = re.compile(r'<style[^>]*>[^<]*</style>|<!--.*?-->|(?<=<g) id="[^"]*"| transform="rotate\(-0 [^"]*"|(?<=\n) +')
"""What a page does not need of a picture: styles of the whole page, comments, names of groups, turns by nothing."""


def charts(panels: Sequence[Panel]) -> Html:
    """Return panels side by side, as many as there is room for."""
    return element("div", *map(chart, panels), class_="charts")


def chart(panel: Panel) -> Html:
    """Return a panel as a figure of a page: its title, its picture, and its values in a table."""
    title = panel.title or panel.y_label
    values = details("Values", data_table(_values(panel, title)))
    return element("figure", element("figcaption", title), _picture(panel), values)


def _picture(panel: Panel) -> Html:
    """Return the drawing of a panel, with the colors of the page."""
    about = description(panel)
    labels = [line.label for line in panel.lines] + [level.label for level in panel.levels]
    height = HEIGHT + LEGEND_ROW * len(list(filter(None, labels)))
    drawn = svg(Figure([[panel._replace(title="")]], (WIDTH, height), legend_columns=1), name=about)
    inside = NOISE.sub("", drawn.partition("</metadata>")[2].rpartition("</svg>")[0])
    inside = re.sub(r' d="[^"]*"', lambda path: re.sub(r"(\.\d\d)\d+", r"\1", path[0]), inside)
    inside = re.sub(r'#[0-9a-f]{6}(?=[;"])', lambda color: VARIABLES.get(color[0], color[0]), inside)
    return element("svg", Html(inside), viewBox=f"0 0 {72 * WIDTH:g} {72 * height:g}", role="img", aria_label=about)


def description(panel: Panel) -> str:
    """Return what a panel shows, in numbers."""
    parts = [f"Line chart: {panel.title or panel.y_label}, {panel.y_label} by {panel.x_label}."]
    for line in panel.lines:
        points = [(x, y) for x, y in zip(line.x, line.y, strict=True) if math.isfinite(y)]
        if points:
            ends = " to ".join(f"{y:.4g} at {_number(panel, x)}" for x, y in (points[0], points[-1]))
            low, high = (choose(points, key=lambda point: point[1]) for choose in (min, max))
            extremes = f"lowest {low[1]:.4g} at {_number(panel, low[0])}, highest {high[1]:.4g}"
            parts.append(f"{line.label or 'Line'}: {ends}; {extremes} at {_number(panel, high[0])}.")
    parts += [f"{level.text or level.label}: {level.y:.4g}." for level in panel.levels]
    parts += [f"{mark.text}: {_number(panel, mark.x)}." for mark in panel.marks]
    return " ".join(parts)


def _number(panel: Panel, x: float) -> str:
    return panel.tick_name(int(x)) if panel.ticks else f"{x:,.4g}" if x < 1000 else f"{x:,.0f}"


def _values(panel: Panel, title: str) -> Table:
    """Return a table of all points."""
    columns, series = [Column(panel.x_label or "x", 0, align="<")], []
    for line in panel.lines:
        columns.append(Column(line.label or panel.y_label, 0, ".4g"))
        series.append(dict(zip(line.x, line.y, strict=True)))
        for name, edge in zip(("from", "to"), line.bounds(panel.y_limits) or (), strict=False):
            columns.append(Column(name, 0, ".4g"))
            series.append(dict(zip(line.x, edge, strict=True)))
    xs = sorted({x for values in series for x in values})
    return Table(title, columns, [[_number(panel, x), *(values.get(x) for values in series)] for x in xs])
