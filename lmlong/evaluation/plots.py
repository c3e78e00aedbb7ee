"""Curves of bits per byte against length, drawn so that they can be told apart in grey."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from lmlong.charts import COLOURS, LINES, MARKERS, clear
from lmlong.evaluation.lengths import name_length
from lmlong.evaluation.perplexity import Curve


def draw(curves: Sequence[Curve], path: Path) -> None:
    """Draw bits per byte against length into an image file."""
    figure(curves).savefig(path, dpi=160)


def figure(curves: Sequence[Curve]) -> Figure:
    """Bits per byte against length, a line for each run and a mark where it was trained."""
    drawn = Figure(figsize=(6.4, 4.2), layout="constrained")  # no pyplot: that would look for a screen
    axes = drawn.subplots()
    for number, curve in enumerate(curves):
        _line(axes, curve, number)
    _trained(axes, curves)
    _axes(axes, curves)
    # beside the lines and never over them, wherever they run
    drawn.legend(loc="outside upper left", ncols=2, frameon=False)
    return drawn


def _line(axes: Axes, curve: Curve, number: int) -> None:
    axes.plot(
        [point.length for point in curve.points],
        [point.totals.bits_per_byte for point in curve.points],
        marker=MARKERS[number % len(MARKERS)],
        markeredgecolor="white",
        markersize=8,
        linestyle=LINES[number % len(LINES)],
        color=COLOURS[number % len(COLOURS)],
        label=curve.name,
    )


def _trained(axes: Axes, curves: Sequence[Curve]) -> None:
    """A vertical line at each length that a run was trained at."""
    for length in sorted({curve.trained_length for curve in curves}):
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


def _axes(axes: Axes, curves: Sequence[Curve]) -> None:
    lengths = sorted({point.length for curve in curves for point in curve.points})
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [name_length(length) for length in lengths])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("tokens in a window, each window read from an empty state")
    axes.set_ylabel("bits per byte")
    clear(axes)
