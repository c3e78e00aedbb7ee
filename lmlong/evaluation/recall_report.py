"""Recall by distance as a table, as plain values and as a chart."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from lmlong.charts import COLOURS, LINES, MARKERS, clear, name_places
from lmlong.evaluation.recall import Recall, Recalled
from lmlong.lengths import name_length


def table(found: Sequence[Recalled]) -> str:
    """The models under one another, a column for each probe."""
    return "\n\n".join(map(_section, found))


def plain(found: Sequence[Recalled]) -> dict[str, Any]:
    """Counts, and the ratios made of them; null where there is no number."""
    return {
        "runs": [
            {"run": each.name, "trained_length": each.trained_length, "recall": [_plain(at) for at in each.recalls]}
            for each in found
        ]
    }


def draw(found: Sequence[Recalled], path: Path) -> None:
    """Accuracy against distance into an image file, a panel for each probe."""
    figure(found).savefig(path, dpi=160)


def figure(found: Sequence[Recalled]) -> Figure:
    probes = list(dict.fromkeys(at.probe for each in found for at in each.recalls))
    drawn = Figure(figsize=(max(6.4, 3.2 * len(probes)), 4.0), layout="constrained")
    panels = drawn.subplots(1, len(probes), sharey=True, squeeze=False)[0]
    for axes, probe in zip(panels, probes, strict=True):
        for number, each in enumerate(found):
            points = [at for at in each.recalls if at.probe == probe]
            axes.errorbar(
                [at.distance for at in points],
                [at.accuracy for at in points],
                yerr=[2 * at.error for at in points],
                marker=MARKERS[number % len(MARKERS)],
                linestyle=LINES[number % len(LINES)],
                color=COLOURS[number % len(COLOURS)],
                capsize=3,
                label=each.name,
            )
        name_places(axes, sorted({at.distance for each in found for at in each.recalls}), name_length)
        axes.set_title(probe)
        axes.set_xlabel("tokens back")
        axes.set_ylim(-0.03, 1.03)
        clear(axes)
    panels[0].set_ylabel("accuracy, ± 2 standard errors")
    drawn.legend(*panels[0].get_legend_handles_labels(), loc="outside upper left", ncols=3, frameon=False)
    return drawn


def _section(each: Recalled) -> str:
    probes = list(dict.fromkeys(at.probe for at in each.recalls))
    distances = list(dict.fromkeys(at.distance for at in each.recalls))
    found = {(at.probe, at.distance): at for at in each.recalls}
    lines = [
        each.name,
        f"  how often the likeliest token is the right one, in {len(each.recalls[0].asked):,} texts each",
        f"{'distance':>10}" + "".join(f"{probe:>10}{'±':>4}" for probe in probes),
    ]
    for distance in distances:
        cells = [_cells(found[probe, distance]) for probe in probes]
        lines.append(f"{name_length(distance):>10}{''.join(cells)}")
    return "\n".join(lines)


def _cells(at: Recall) -> str:
    error = "-" if math.isnan(at.error) else f"{at.error:.2f}".removeprefix("0")
    return f"{at.accuracy:>10.3f}{error:>4}"


def _plain(at: Recall) -> dict[str, Any]:
    return {
        "probe": at.probe,
        "distance": at.distance,
        "texts": len(at.asked),
        "asked": int(at.asked.sum()),
        "right": int(at.right.sum()),
        "accuracy": at.accuracy,
        "error": at.error if math.isfinite(at.error) else None,
    }
