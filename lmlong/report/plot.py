"""Figures drawn by matplotlib into image files and images."""

import warnings
from io import StringIO
from pathlib import Path
from typing import Any

import matplotlib.figure
import numpy as np
from matplotlib import colormaps, rc_context
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, NullLocator

from lmlong.errors import UsageError
from lmlong.report.figure import Figure, Level, Line, Numbers, Panel, Style
from lmlong.report.html import UNSAFE

FORMATS = (".png", ".pdf", ".svg")
GUIDE = (0, (4, 3))
"""The dashes of vertical marks."""
DPI = 160
SVG: dict[Any, Any] = {"svg.fonttype": "none", "font.sans-serif": ["DejaVu Sans"]}
"""Text stays text in SVG."""
LARGEST = 1e100
"""The upper limit of drawn values, and its inverse the lower one on a log scale."""
NOTE_BELOW = 42
"""Points between a panel and its note, where its ticks and label stand."""
TITLE_PAD, MARK_HEIGHT = 6, 12
"""Points between a panel and its title, and of each row of marks between them."""
BRIEF = 3
"""Characters up to which the text of a mark needs no row of its own."""


def check_format(path: Path) -> None:
    """Raise a UsageError for a file name whose format cannot be drawn, before anything is measured."""
    if path.suffix.lower() not in FORMATS:
        raise UsageError(f"{path}: cannot be drawn. Give a name that ends in {', '.join(FORMATS)}.")


def save(figure: Figure, path: Path) -> None:
    """Draw a figure into an image file."""
    if path.suffix.lower() == ".svg":
        path.write_text(svg(figure, name="lmlong"), encoding="utf-8")
    else:
        draw(figure).savefig(path, dpi=DPI)


def svg(figure: Figure, name: str) -> str:
    """Return a figure as SVG, always the same. Figures of one page need different names, on which their ids depend."""
    text = StringIO()
    with rc_context({**SVG, "svg.hashsalt": name}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # the reader's fonts show the text
        draw(figure).savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()


def draw(figure: Figure) -> matplotlib.figure.Figure:
    """Return the figure of matplotlib."""
    drawn = matplotlib.figure.Figure(
        figsize=figure.size, layout="constrained"
    )  # not by pyplot, which may need a screen
    grid = drawn.subplots(
        len(figure.rows),
        len(figure.rows[0]),
        sharex=figure.share_x,
        sharey=figure.share_y,
        squeeze=False,
    )
    placed = [pair for row, panels in zip(grid, figure.rows, strict=True) for pair in zip(row, panels, strict=False)]
    for axes, panel in placed:
        _draw_panel(axes, panel)
    for row, panels in zip(grid, figure.rows, strict=True):
        lines_above = max((1 + row for panel in panels for row in _mark_rows(panel)), default=0)
        for axes, panel in zip(row, panels, strict=False):
            axes.set_title(literal(panel.title), y=1.0, pad=TITLE_PAD + MARK_HEIGHT * lines_above)
        for axes in row[len(panels) :]:
            axes.remove()
    for axes, panel in placed:
        _set_ranges(axes, panel)  # last, as an open end of a shared axis takes all panels into account
        _label_outer(axes, figure)
    if figure.legend_columns:
        named = [axes for axes, _ in placed] if figure.legend_row is None else [grid[figure.legend_row, 0]]
        pairs = [axes.get_legend_handles_labels() for axes in named]
        handles = {label: handle for pair in pairs for handle, label in zip(*pair, strict=True)}
        # beside the lines and never over them, wherever they run
        drawn.legend(
            handles.values(), handles.keys(), loc="outside upper left", ncols=figure.legend_columns, frameon=False
        )
    return drawn


def _draw_panel(axes: Axes, panel: Panel) -> None:
    for line in panel.lines:
        _draw_line(axes, line, panel)
    for level in panel.levels:
        _draw_level(axes, level)
    _set_scales(axes, panel)
    axes.set_xlabel(literal(panel.x_label))
    axes.set_ylabel(literal(panel.y_label))
    if panel.right_label:
        _draw_right_axis(axes, panel)
    if panel.note:
        _annotate(axes, panel.note, (0, 0), "axes fraction", (0, -NOTE_BELOW), va="top")
    # only the axes that carry a scale, and faint lines to read values by, behind the data
    axes.grid(axis="y", color="0.9")
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_axisbelow(True)
    if panel.shade_from is not None:
        axes.axvspan(panel.shade_from, panel.ticks[-1], color="0.95", zorder=-1)
    if panel.marks:
        _draw_marks(axes, panel)


def _draw_line(axes: Axes, line: Line, panel: Panel) -> None:
    color, bounds = _color(line.style), line.bounds(panel.y_limits)
    x, y = _drawable(line.x, bool(panel.ticks)), _drawable(line.y, panel.y_scale != "linear")
    looks: dict[str, Any] = {"color": color, "linestyle": line.style.dashes, "marker": line.style.marker}
    if line.label:
        looks["label"] = literal(line.label)
    if line.errors is not None:
        lengths = np.abs(np.asarray(bounds) - np.asarray(line.y))
        axes.errorbar(x, y, yerr=lengths, capsize=3, **looks)
        return
    axes.plot(x, y, **looks, markersize=line.style.marker_size, markerfacecolor=color, markeredgecolor="white")
    low, high = (_drawable(edge, panel.y_scale != "linear") for edge in bounds or ((), ()))
    if np.isfinite(low).any():
        axes.fill_between(x, low, high, color=color, alpha=0.15, linewidth=0)


def _drawable(values: Numbers, is_log: bool) -> np.ndarray:
    """Return values with nan for those that have no place on an axis."""
    numbers = np.asarray(values, dtype=float)
    sizes = np.abs(numbers)
    return np.where((sizes < LARGEST) & ((numbers > 1 / LARGEST) | (not is_log)), numbers, np.nan)


def literal(text: str) -> str:
    """Return text as it is shown: a dollar sign begins no formula, and characters that cannot be shown are replaced."""
    return UNSAFE.sub("\ufffd", text).replace("$", r"\$")


def _color(style: Style) -> Any:
    return style.color if isinstance(style.color, str) else colormaps["viridis"](style.color)


def _draw_level(axes: Axes, level: Level) -> None:
    color = _color(level.style)
    label = level.label and literal(level.label)
    axes.axhline(level.y, color=color, linewidth=level.width, linestyle=level.style.dashes, label=label)
    if level.text:
        _annotate(axes, level.text, (0, level.y), ("axes fraction", "data"), (2, 2), color)


def _mark_rows(panel: Panel) -> list[int]:
    """Return the rows of text above a panel in which its marks are named: each in one of its own unless it is brief."""
    return [row if len(mark.text) > BRIEF else 0 for row, mark in enumerate(panel.marks)]


def _draw_marks(axes: Axes, panel: Panel) -> None:
    """Draw vertical lines, and their texts above the panel."""
    for mark in panel.marks:
        axes.axvline(mark.x, color="0.6", linewidth=1, linestyle=GUIDE, zorder=0)
    texts = [literal(mark.text) + "\n" * row for row, mark in zip(_mark_rows(panel), panel.marks, strict=True)]
    top = axes.secondary_xaxis("top")
    top.set_xticks([mark.x for mark in panel.marks], texts, fontsize="small", color="0.35")
    top.tick_params(length=0)
    top.xaxis.set_minor_locator(NullLocator())
    top.spines["top"].set_visible(False)


def _annotate(
    axes: Axes, text: str, at: tuple, coordinates: Any, offset: tuple, color: Any = "black", **align: Any
) -> None:
    offsets: dict[str, Any] = {"xytext": offset, "textcoords": "offset points"}
    axes.annotate(literal(text), at, xycoords=coordinates, **offsets, fontsize="small", color=color, **align)


def _set_scales(axes: Axes, panel: Panel) -> None:
    if panel.ticks:
        shown = panel.ticks[:: -(-len(panel.ticks) // 8)]  # no more names than can be read
        axes.set_xscale("log", base=2)
        names = [panel.tick_name(tick) for tick in shown]
        axes.set_xticks(shown, names)
        axes.xaxis.set_minor_locator(NullLocator())
    if panel.y_scale != "linear":
        axes.set_yscale("log")
    else:
        axes.ticklabel_format(axis="y", useOffset=False)
    if panel.y_scale == "log 1-2-5":
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:,.0f}")
        axes.yaxis.set_minor_locator(NullLocator())


def _set_ranges(axes: Axes, panel: Panel) -> None:
    if panel.y_range:
        axes.set_ylim(*panel.y_range)
    low, high = axes.get_ylim()
    if 0 <= high - low < panel.least_span:
        axes.set_ylim((low + high - panel.least_span) / 2, (low + high + panel.least_span) / 2)


def _draw_right_axis(axes: Axes, panel: Panel) -> None:
    """Draw an axis at the right end, with the ticks of the y axis."""
    right = axes.secondary_yaxis("right")
    right.set_ylabel(panel.right_label)
    right.yaxis.set_major_formatter(lambda value, _: panel.right_name(value))
    right.spines["right"].set_visible(False)


def _label_outer(axes: Axes, figure: Figure) -> None:
    """Remove the label of a shared axis from a panel that is not at the edge."""
    spec = axes.get_subplotspec()
    assert spec is not None
    if figure.share_x and not spec.is_last_row():
        axes.set_xlabel("")
    if figure.share_y and not spec.is_first_col():
        axes.set_ylabel("")
