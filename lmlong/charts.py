"""What all charts share: formats, colours that can be told apart in grey, axes without clutter."""

from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.ticker import NullLocator

from lmlong.errors import UsageError

FORMATS = (".png", ".pdf", ".svg")
MARKERS = ["o", "s", "^", "D", "v", "P"]
LINES = ["-", "--", "-.", ":", "-", "--"]
# dark to light, so that neighbours differ in grey as well as in hue
COLOURS = ["#1b3a6b", "#c2571a", "#2a8c7f", "#a9708f", "#4d4d4d", "#8f9a2b"]


def check_format(path: Path) -> None:
    """Refuse a name whose format cannot be drawn, before hours are spent on what it should show."""
    if path.suffix.lower() not in FORMATS:
        raise UsageError(f"{path}: cannot be drawn. Give a name that ends in {', '.join(FORMATS)}.")


def clear(axes: Axes) -> None:
    """Only the axes that carry a scale, and faint lines to read values by, behind the data."""
    axes.grid(axis="y", color="0.9")
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_axisbelow(True)


def name_places(axes: Axes, places: Sequence[int], name: Callable[[int], str]) -> None:
    """A log scale with a name at each place, at every second one where there are many."""
    shown = places[:: -(-len(places) // 8)]
    axes.set_xscale("log", base=2)
    axes.set_xticks(shown, [name(place) for place in shown])
    axes.xaxis.set_minor_locator(NullLocator())
