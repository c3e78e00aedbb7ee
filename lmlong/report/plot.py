"""Figures drawn by matplotlib into image files and images."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.figure
import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Annotation
from matplotlib.ticker import LogLocator, NullLocator
from matplotlib.transforms import Bbox

from lmlong.errors import UsageError
from lmlong.report.figure import Figure, HeatMap, Level, Line, Mark, Panel, Style

FORMATS = (".png", ".pdf", ".svg")
GUIDE = (0, (4, 3))
"""The dashes of vertical marks."""
DPI = 160
TITLE_PAD, LINE_HEIGHT = 6, 14
"""Points between a panel and its title, and of each row of text between them."""
LEGEND_COLUMNS = 3
SMALL: dict[str, Any] = {"fontsize": "small"}
MOST_NUMBERED = 64
"""The largest number of fields of a heat map that show their numbers, which are illegible in smaller fields."""


def check_format(path: Path) -> None:
    """Raise a UsageError for a file name whose format cannot be drawn, before anything is measured."""
    if path.suffix.lower() not in FORMATS:
        raise UsageError(f"{path}: cannot be drawn. Give a name that ends in {', '.join(FORMATS)}.")


def save(figure: Figure, path: Path) -> None:
    """Draw a figure into an image file."""
    draw(figure).savefig(path, dpi=DPI)


def pixels(figure: Figure) -> np.ndarray:
    """Return the figure as an RGB image (height, width, 3) of bytes."""
    drawn = draw(figure)
    drawn.set_dpi(DPI)
    canvas = FigureCanvasAgg(drawn)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()


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
        width_ratios=figure.column_widths,
    )
    drawn_panels: list[tuple[Axes, Panel | HeatMap]] = []
    above: list[list[Annotation]] = []
    for row, panels in zip(grid, figure.rows, strict=True):
        of_row = list(zip(row, panels, strict=False))
        with_titles = [(axes, panel) for axes, panel in of_row if isinstance(panel, Panel)]
        above += [_draw_panel(axes, panel) for axes, panel in with_titles]
        _set_titles(with_titles)
        for axes, heat in of_row:
            if isinstance(heat, HeatMap):
                _draw_heat_map(axes, heat)
        drawn_panels += of_row
        for axes in row[len(panels) :]:
            axes.remove()
    for axes, panel in drawn_panels:
        if isinstance(panel, Panel):
            _set_ranges(axes, panel)  # last, as an open end of a shared axis takes all panels into account
            _label_outer(axes, figure)
    if any(len(texts) > 1 for texts in above):
        drawn.draw_without_rendering()  # places the panels
    for texts in above:
        _stack(texts)
    if figure.legend_columns:
        named = [axes for axes, panel in drawn_panels if isinstance(panel, HeatMap) or not panel.legend]
        named = named if figure.legend_row is None else [grid[figure.legend_row, 0]]
        pairs = [axes.get_legend_handles_labels() for axes in named]
        handles = {label: handle for pair in pairs for handle, label in zip(*pair, strict=True)}
        # beside the lines and never over them, wherever they run
        drawn.legend(
            handles.values(), handles.keys(), loc="outside upper left", ncols=figure.legend_columns, frameon=False
        )
    return drawn


def _draw_panel(axes: Axes, panel: Panel) -> list[Annotation]:
    """Draw a panel, and return the texts of marks above it."""
    for line in panel.lines:
        _draw_line(axes, line, panel.y_limits)
    for level in panel.levels:
        _draw_level(axes, level)
    _set_scales(axes, panel)
    axes.set_xlabel(panel.x_label)
    axes.set_ylabel(panel.y_label)
    if panel.right_label:
        _draw_right_axis(axes, panel)
    if panel.legend:
        placed: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (0, 1), "borderaxespad": 0}
        axes.legend(**placed, ncols=LEGEND_COLUMNS, columnspacing=1, frameon=False, fontsize="small")
    if panel.note:
        _annotate(axes, panel.note, (0, 0), "axes fraction", (0, -3 * LINE_HEIGHT), va="top")
    # only the axes that carry a scale, and faint lines to read values by, behind the data
    axes.grid(axis="y", color="0.9")
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_axisbelow(True)
    if panel.shade_from is not None:
        axes.axvspan(panel.shade_from, panel.ticks[-1], color="0.95", zorder=-1)
    texts = [_draw_mark(axes, mark) for mark in panel.marks]
    return [text for text, mark in zip(texts, panel.marks, strict=True) if mark.at == "above"]


def _set_titles(panels: Sequence[tuple[Axes, Panel]]) -> None:
    """Draw the titles of a row of panels at one height, above all text between."""
    rows = max((_rows_above(axes, panel) for axes, panel in panels), default=0)
    for axes, panel in panels:
        axes.set_title(panel.title, pad=TITLE_PAD + LINE_HEIGHT * rows, **SMALL if panel.small else {})


def _rows_above(axes: Axes, panel: Panel) -> int:
    """Return the rows of text between a panel and its title."""
    legend = axes.get_legend()
    in_legend = 0 if legend is None else -(-len(legend.get_texts()) // LEGEND_COLUMNS)
    return in_legend + sum(mark.at == "above" for mark in panel.marks)


def _draw_line(axes: Axes, line: Line, limits: tuple[float, float]) -> None:
    color, bounds = _color(line.style), line.bounds(limits)
    looks: dict[str, Any] = {"color": color, "linestyle": line.style.dashes, "marker": line.style.marker}
    if line.errors is not None:
        lengths = np.abs(np.asarray(bounds) - np.asarray(line.y))
        axes.errorbar(line.x, line.y, yerr=lengths, capsize=3, label=line.label, **looks)
        return
    axes.plot(line.x, line.y, label=line.label, **looks, **_marker(line.style))
    if bounds is not None:
        axes.fill_between(line.x, *bounds, color=color, alpha=0.15, linewidth=0)


def _color(style: Style) -> Any:
    return style.color if isinstance(style.color, str) else colormaps["viridis"](style.color)


def _marker(style: Style) -> dict[str, Any]:
    """Return the options of matplotlib for a marker."""
    return {"markersize": style.marker_size, "markerfacecolor": _color(style), "markeredgecolor": "white"}


def _stack(texts: Sequence[Annotation]) -> None:
    """Raise each text above a panel until it overlaps none of those before."""
    boxes: list[Bbox] = []
    for text in texts:
        while any(text.get_window_extent().overlaps(box) for box in boxes):
            text.xyann = (0, text.xyann[1] + 1)
        boxes.append(text.get_window_extent())


def _draw_level(axes: Axes, level: Level) -> None:
    color = _color(level.style)
    axes.axhline(level.y, color=color, linewidth=level.width, linestyle=level.style.dashes, label=level.label)
    if level.text:
        _annotate(axes, level.text, (0, level.y), ("axes fraction", "data"), (2, 2), color)


def _draw_mark(axes: Axes, mark: Mark) -> Annotation:
    axes.axvline(mark.x, color="0.6", linewidth=1, linestyle=GUIDE, zorder=0)
    if mark.at == "above":
        centered: dict[str, Any] = {"ha": "center", "va": "bottom"}
        return _annotate(axes, mark.text, (mark.x, 1), ("data", "axes fraction"), (0, 4), "0.35", **centered)
    return _annotate(axes, mark.text, (mark.x, 0), "data", (3, 3), "0.35")


def _annotate(
    axes: Axes, text: str, at: tuple, coordinates: Any, offset: tuple, color: Any = "black", **align: Any
) -> Annotation:
    offsets: dict[str, Any] = {"xytext": offset, "textcoords": "offset points"}
    return axes.annotate(text, at, xycoords=coordinates, **offsets, fontsize="small", color=color, **align)


def _set_scales(axes: Axes, panel: Panel) -> None:
    if panel.ticks:
        shown = panel.ticks[:: -(-len(panel.ticks) // 8)]  # no more names than can be read
        axes.set_xscale("log", base=2)
        names = [panel.tick_name(tick) for tick in shown]
        axes.set_xticks(shown, names, **SMALL if panel.small else {})
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
    if panel.x_range:
        axes.set_xlim(*panel.x_range)
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


def _draw_heat_map(axes: Axes, heat: HeatMap) -> None:
    values = np.asarray(heat.values)
    low, high = heat.color_range
    image = axes.imshow(values, vmin=low, vmax=high, cmap="cividis", aspect="auto")
    axes.set_xticks(*_counted(values.shape[1]))
    axes.set_yticks(*_counted(values.shape[0]))
    axes.set_xlabel(heat.x_label)
    axes.set_ylabel(heat.y_label)
    axes.set_title(heat.title)
    if values.size <= MOST_NUMBERED:
        for (row, column), value in np.ndenumerate(values):
            color = "black" if value > low + 0.6 * (high - low) else "white"
            axes.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize="small", color=color)
    assert axes.figure is not None
    axes.figure.colorbar(image, ax=axes)


def _counted(count: int) -> tuple[list[int], list[str]]:
    """Return up to 12 ticks from 0 and their labels, which count from 1."""
    ticks = list(range(0, count, -(-count // 12)))
    return ticks, [str(tick + 1) for tick in ticks]
