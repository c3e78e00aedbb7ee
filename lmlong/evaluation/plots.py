"""What a report found, drawn so that runs can be told apart in grey: a panel for each view."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lmlong.charts import COLOURS, LINES, MARKERS, clear, name_places
from lmlong.evaluation.report import Report
from lmlong.evaluation.sums import Sums
from lmlong.lengths import name_length


def draw(reports: Sequence[Report], path: Path) -> None:
    """Draw bits per byte by all views that were taken into an image file."""
    figure(reports).savefig(path, dpi=160)


def figure(reports: Sequence[Report]) -> Figure:
    """Bits per byte against context, position and window, with bands of two standard errors.

    All contexts have the same targets, so what is uncertain about the height of that line is uncertain about all of it
    alike: its band is that of the change from the shortest context.
    """
    panels = [
        (draw_panel, label)
        for view, draw_panel, label in (
            ("context", _context, "tokens read before the same targets\n(band: the change from the shortest)"),
            ("position", _position, "tokens before, read from the beginning"),
            ("windows", _windows, "tokens in a window"),
        )
        if any(getattr(report, view) for report in reports)
    ]
    drawn = Figure(figsize=(max(6.4, 4.6 * len(panels)), 4.4), layout="constrained")  # no pyplot: it wants a screen
    row = drawn.subplots(1, len(panels), squeeze=False)[0]
    for axes, (draw_panel, label) in zip(row, panels, strict=True):
        places = sorted({place for number, report in enumerate(reports) for place in draw_panel(axes, report, number)})
        name_places(axes, places, name_length)
        axes.set_xlabel(label)
        clear(axes)
        _trained(axes, places, reports)
    row[0].set_ylabel("bits per byte, ± 2 standard errors")
    # beside the lines and never over them, wherever they run
    handles = {label: handle for axes in row for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    drawn.legend(handles.values(), handles.keys(), loc="outside upper left", ncols=3, frameon=False)
    return drawn


def _context(axes: Axes, report: Report, number: int) -> list[int]:
    points = [(length, sums) for length, sums, _ in report.context]
    errors = [sums.bits_error_from(points[0][1]) for _, sums in points]
    return _line(axes, points, number, report.name, errors)


def _position(axes: Axes, report: Report, number: int) -> list[int]:
    return _line(axes, [(first, sums) for first, _, sums in report.position], number, report.name)


def _windows(axes: Axes, report: Report, number: int) -> list[int]:
    """The two ways of windows, filled and hollow, and what a carried state loses as a level."""
    _line(axes, [(length, reset) for length, reset, _ in report.windows], number, f"{report.name}, reset")
    sliding = [(length, sums) for length, _, sums in report.windows]
    places = _line(axes, sliding, number, f"{report.name}, sliding", hollow=True)
    if report.carried and report.windows:
        level = report.carried.totals.bits_per_byte
        axes.axhline(level, color=_of(COLOURS, number), linewidth=1, linestyle=(0, (1, 2)))
        axes.annotate(
            "carried",
            (0, level),
            xycoords=("axes fraction", "data"),
            xytext=(2, 2),
            textcoords="offset points",
            fontsize="small",
            color=_of(COLOURS, number),
        )
    return places


def _line(
    axes: Axes,
    points: Sequence[tuple[int, Sums]],
    number: int,
    label: str,
    errors: Sequence[float] | None = None,
    hollow: bool = False,
) -> list[int]:
    """Draw bits per byte at some places, by default with their own errors; returns the places."""
    places, bits = [place for place, _ in points], [sums.totals.bits_per_byte for _, sums in points]
    errors = errors or [sums.bits_error for _, sums in points]
    colour = _of(COLOURS, number)
    axes.plot(
        places,
        bits,
        marker=_of(MARKERS, number),
        markerfacecolor="white" if hollow else colour,
        markeredgecolor=colour if hollow else "white",
        markersize=7,
        linestyle=_of(LINES, number),
        color=colour,
        label=label,
    )
    low, high = ([bit + 2 * sign * error for bit, error in zip(bits, errors, strict=True)] for sign in (-1, 1))
    axes.fill_between(places, low, high, color=colour, alpha=0.15, linewidth=0)
    return places


def _trained(axes: Axes, places: Sequence[int], reports: Sequence[Report]) -> None:
    """A vertical line at each length that a run was trained at, and a shade beyond the longest."""
    for length in sorted({report.trained_length for report in reports}):
        if not places[0] <= length <= places[-1]:
            continue
        axes.axvline(length, color="0.6", linewidth=1, linestyle=(0, (4, 3)), zorder=0)
        axes.annotate(
            f"trained at {name_length(length)}",
            (length, 1),
            xycoords=("data", "axes fraction"),
            xytext=(0, 4),
            textcoords="offset points",
            ha="center",
            va="bottom",
            fontsize="small",
            color="0.35",
        )
    beyond = max(report.trained_length for report in reports)
    if places[0] <= beyond < places[-1]:
        axes.axvspan(beyond, places[-1], color="0.95", zorder=-1)


def _of(values: Sequence[str], number: int) -> str:
    return values[number % len(values)]
