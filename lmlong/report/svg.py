"""Panels as inline SVG charts of an HTML page, each with its numbers as a text and as a table."""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from lmlong.report.figure import COLORS, Dashes, Level, Line, Panel, Style
from lmlong.report.html import Html, data_table, details, element, join
from lmlong.report.table import Column

WIDTH, HEIGHT = 420, 260
LEFT, RIGHT, TOP, BOTTOM = 48, 12, 34, 42
"""The margins of the axes, in which the ticks and labels stand."""
LINE = 14
"""The height of a line of text."""
LARGEST = 1e100
"""The upper limit of drawn values."""
TICKS = 8
"""The largest number of named ticks of an axis."""

MARKERS = {
    "o": "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0z",
    "s": "M-3.5-3.5h7v7h-7z",
    "^": "M0-4.5l4.5 8h-9z",
    "v": "M0 4.5l4.5-8h-9z",
    "D": "M0-5l5 5l-5 5l-5-5z",
    "P": "M-1.5-4.5h3v3h3v3h-3v3h-3v-3h-3v-3h3z",
}
DASHES = {"-": None, "--": "7 4", "-.": "7 3 2 3", ":": "2 3"}
"""The markers and dashes of matplotlib, in SVG."""


class Scale(NamedTuple):
    """The positions of values along an axis, from `begin` to `end`."""

    low: float
    high: float
    begin: float
    end: float
    log: bool

    def __call__(self, value: float) -> float:
        low, high, at = (
            (math.log(x) for x in (self.low, self.high, value)) if self.log else (self.low, self.high, value)
        )
        return round(self.begin + (self.end - self.begin) * (at - low) / (high - low), 1)

    def shows(self, *values: float) -> bool:
        return all(_usable(value, self.log) for value in values)


def _usable(value: float, log: bool) -> bool:
    """Return whether a value has a place on a scale; nan and the infinities have none."""
    return abs(value) < LARGEST and (value > 1 / LARGEST or not log)


def chart(panel: Panel) -> Html:
    """Return a panel as a figure: its title, legend, lines, and their values in a table."""
    x, y = _scales(panel)
    height = HEIGHT + LINE * panel.x_label.count("\n")
    drawing = element(
        "svg",
        *_axes(panel, x, y),
        *(part for line in panel.lines for part in _line(line, panel, x, y)),
        *(_level(level, y, _right(panel)) for level in panel.levels if y.shows(level.y)),
        viewBox=f"0 0 {WIDTH} {height}",
        role="img",
        aria_label=description(panel),
    )
    named = [(line.label, line.style) for line in panel.lines if line.label]
    named += [(level.label, level.style) for level in panel.levels if level.label]
    legend = element("ul", *(_key(label, style) for label, style in named), class_="legend")
    values = details("Values", data_table(*_values(panel), caption=panel.title or panel.y_label))
    return element("figure", element("figcaption", panel.title or panel.y_label), legend, drawing, values)


def charts(panels: Sequence[Panel]) -> Html:
    """Return panels side by side, as many as there is room for."""
    return element("div", *map(chart, panels), class_="charts")


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


def _values(panel: Panel) -> tuple[list[Column], list[list[float | str | None]]]:
    """Return the columns and rows of all points."""
    columns, series = [Column(panel.x_label or "x", 0, align="<")], []
    for line in panel.lines:
        columns.append(Column(line.label or panel.y_label, 0, ".4g"))
        series.append(dict(zip(line.x, line.y, strict=True)))
        for name, edge in zip(("from", "to"), line.bounds(panel.y_limits) or (), strict=False):
            columns.append(Column(name, 0, ".4g"))
            series.append(dict(zip(line.x, edge, strict=True)))
    xs = sorted({x for values in series for x in values})
    return columns, [[_number(panel, x), *(values.get(x) for values in series)] for x in xs]


def _scales(panel: Panel) -> tuple[Scale, Scale]:
    """Return the scales of both axes, on which every finite value has its place."""
    xs = [float(x) for line in panel.lines for x in line.x] + [*panel.ticks]
    parts = [part for line in panel.lines for part in (line.y, *(line.bounds(panel.y_limits) or ()))]
    ys = [float(y) for part in parts for y in part]
    ys += [level.y for level in panel.levels]
    x_log, y_log = bool(panel.ticks), panel.y_scale != "linear"
    x = _scale(xs, (None, None), LEFT, _right(panel), x_log, 0.0)
    return x, _scale(ys, panel.y_range or (None, None), HEIGHT - BOTTOM, _top(panel), y_log, 0.05)


def _right(panel: Panel) -> int:
    """Return the right end of the axes, which leaves room for the ticks of an axis there."""
    return WIDTH - (LEFT if panel.right_label else RIGHT)


def _top(panel: Panel) -> int:
    """Return the upper end of the axes, below the texts of all marks."""
    return TOP + LINE * max(0, len(panel.marks) - 1)


def _scale(
    values: Sequence[float], given: tuple[float | None, float | None], begin: float, end: float, log: bool, pad: float
) -> Scale:
    usable = [value for value in values if _usable(value, log)] or [1.0]
    low, high = min(usable), max(usable)
    if low == high:
        low, high = (low / 2, high * 2) if log else (low - 0.5, high + 0.5)
    room = pad * (math.log(high / low) if log else high - low)
    ends = (low * math.exp(-room), high * math.exp(room)) if log else (low - room, high + room)
    if low >= 0 and not log:
        ends = max(ends[0], 0.0), ends[1]
    low, high = (end if fixed is None else fixed for fixed, end in zip(given, ends, strict=True))
    return Scale(low, high, begin, end, log)


def ticks(scale: Scale) -> list[float]:
    """Return round values along an axis."""
    if scale.log:
        powers = range(math.floor(math.log10(scale.low)), math.ceil(math.log10(scale.high)) + 1)
        for factors in ((1,), (1, 2, 5), range(1, 10)):
            values = [factor * 10.0**power for power in powers for factor in factors]
            values = [value for value in values if scale.low <= value <= scale.high]
            if len(values) > 2:
                break
        return values[:: -(-len(values) // TICKS)] if values else [scale.low, scale.high]
    raw = (scale.high - scale.low) / 6
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)
    return [number * step for number in range(math.ceil(scale.low / step), math.floor(scale.high / step + 1e-9) + 1)]


def _axes(panel: Panel, x: Scale, y: Scale) -> Iterator[Html]:
    """Yield the grid, the shade, the marks, the ticks and the labels of a panel."""
    top, floor, right = _top(panel), HEIGHT - BOTTOM, _right(panel)
    if panel.shade_from is not None:
        begin = x(panel.shade_from)
        yield _path(f"M{begin} {top}H{x(panel.ticks[-1])}V{floor}H{begin}z", "shade")
    for value in ticks(y):
        yield _path(f"M{LEFT} {y(value)}H{right}", "grid")
        yield _text(_tick(value, y), LEFT - 6, y(value) + 4, "end")
        if panel.right_label:
            yield _text(panel.right_name(value), right + 6, y(value) + 4, "start")
    yield _path(f"M{LEFT} {floor}H{right}", "axis")
    values: Sequence[float] = panel.ticks[:: -(-len(panel.ticks) // TICKS)] if panel.ticks else ticks(x)
    for value in values:
        yield _path(f"M{x(value)} {floor}v4", "axis")
        name = panel.tick_name(int(value)) if panel.ticks else _tick(value, x)
        yield _text(name, x(value), floor + 17, "middle")
    for row, mark in enumerate(panel.marks):
        yield _path(f"M{x(mark.x)} {top}V{floor}", "guide")
        anchor, side = ("end", -4) if x(mark.x) > (LEFT + right) / 2 else ("start", 4)
        yield _text(mark.text, x(mark.x) + side, TOP - 4 + row * LINE, anchor, "faint")
    for row, text in enumerate(panel.x_label.split("\n")):
        yield _text(text, (LEFT + right) / 2, HEIGHT - 6 + row * LINE, "middle", "faint")
    yield _text(" ".join(panel.y_label.split("\n")), 0, LINE, "start", "faint")
    if panel.right_label:
        yield _text(panel.right_label, WIDTH, LINE, "end", "faint")


def _tick(value: float, scale: Scale) -> str:
    """Return the name of a tick, with as many digits as the distance of two ticks has."""
    if scale.log or scale.high >= 1e6:
        return f"{value:,.0f}" if 1000 <= value < 1e6 else f"{value:.3g}"
    digits = max(0, math.ceil(-math.log10((scale.high - scale.low) / 6) - 1e-9))
    return f"{value:,.{digits}f}"


def _line(line: Line, panel: Panel, x: Scale, y: Scale) -> Iterator[Html]:
    """Yield the band or the error bars of a line, the line and its markers."""
    bounds, stroke = line.bounds(panel.y_limits), _color(line.style)
    rows = list(zip(line.x, line.y, *(bounds or (line.y, line.y)), strict=True))
    rows = [row for row in rows if x.shows(row[0]) and y.shows(row[1])]
    between = [row for row in rows if y.shows(*row[2:])]
    if line.errors is not None:
        yield _path("".join(f"M{x(at)} {y(begin)}V{y(end)}" for at, _, begin, end in between), None, stroke=stroke)
    elif bounds and len(between) > 1:
        above = "L".join(f"{x(at)} {y(end)}" for at, _, _, end in between)
        below = "L".join(f"{x(at)} {y(begin)}" for at, _, begin, _ in reversed(between))
        yield _path(f"M{above}L{below}z", "band", fill=stroke)
    points = [f"{x(at)} {y(value)}" for at, value, _, _ in rows]
    if line.style.dashes and len(points) > 1:
        yield _path("M" + "L".join(points), "line", stroke=stroke, stroke_dasharray=_dashes(line.style.dashes))
    yield from (_marker(line.style, point) for point in points if line.style.marker)


def _level(level: Level, y: Scale, right: float) -> Html:
    stroke, at = _color(level.style), y(level.y)
    line = _path(f"M{LEFT} {at}H{right}", None, stroke=stroke, stroke_dasharray=_dashes(level.style.dashes))
    return join([line, _text(level.text, LEFT + 4, at - 4, "start", "faint")] if level.text else [line])


def _marker(style: Style, at: str) -> Html:
    return element("path", d=MARKERS[style.marker or "o"], transform=f"translate({at})", fill=_color(style))


def _key(label: str, style: Style) -> Html:
    """Return an entry of the legend."""
    line = _path("M1 6H33", "line", stroke=_color(style), stroke_dasharray=_dashes(style.dashes))
    marker = [_marker(style, "17 6")] if style.marker else []
    return element("li", element("svg", line, *marker, viewBox="0 0 34 12", aria_hidden="true"), label)


def _color(style: Style) -> str:
    return f"var(--c{COLORS.index(style.color)})" if style.color in COLORS else "var(--faint)"


def _dashes(dashes: Dashes) -> str | None:
    return DASHES.get(dashes) if isinstance(dashes, str) else " ".join(map(str, dashes[1]))


def _path(d: str, class_: str | None, **looks: str | None) -> Html:
    return element("path", d=d, class_=class_, **looks)


def _text(text: str, x: float, y: float, anchor: str, class_: str | None = None) -> Html:
    return element("text", text, x=round(x, 1), y=round(y, 1), text_anchor=anchor, class_=class_)
