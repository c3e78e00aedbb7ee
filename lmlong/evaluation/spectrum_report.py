"""Spectra of attention as a table, as plain values and as a chart."""

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lmlong.charts import clear
from lmlong.evaluation.spectrum import MOST, Spectrum, quarter_of
from lmlong.lengths import name_length

NUMBERED = 64
"""Matrices whose numbers are written into a heat map; among more they could not be read."""


def table(found: Sequence[Spectrum]) -> str:
    """For each run and length a line a layer, at most 80 columns wide but for the names."""
    notes = [
        "",
        "means over the heads and texts, with the range of the heads; where all singular",
        f"values are alike, {MOST:.0%} of n of them hold {MOST:.0%} and n / 4 hold 0.250",
    ]
    return "\n".join(["\n\n".join(map(_section, found)), *notes])


def _section(each: Spectrum) -> str:
    texts = f"{each.texts} text{'' if each.texts == 1 else 's'}"
    lines = [
        f"{each.name}: singular values of attention in {texts} of n = {each.length:,} tokens",
        *_those_of_blocks(each),
        f"{'layer':>7}  {'attention':<10}{f'hold {MOST:.0%}':>10}{'of n':>7}{'heads':>16}{'n/4 hold':>11}{'heads':>16}",
    ]
    rows = zip(each.kinds, each.sizes, each.needed, each.quarter, strict=True)
    for number, (kind, size, needed, quarter) in enumerate(rows, 1):
        lines.append(
            f"{number:>7}  {kind:<10}{needed.mean():>10.1f}{needed.mean() / size:>7.0%}"
            f"{f'{needed.min():.0f} to {needed.max():.0f}':>16}"
            f"{quarter.mean():>11.3f}{f'{quarter.min():.3f} to {quarter.max():.3f}':>16}"
        )
    return "\n".join(lines)


def _those_of_blocks(each: Spectrum) -> list[str]:
    """A line on the layers, side by side, that read fewer vectors than there are tokens."""
    shorter = [number for number, size in enumerate(each.sizes, 1) if size < each.length]
    if not shorter:
        return []
    layers = f"layers {shorter[0]} to {shorter[-1]} read" if len(shorter) > 1 else f"layer {shorter[0]} reads"
    return [f"{layers} blocks of them: n = {min(each.sizes):,} there"]


def plain(found: Sequence[Spectrum]) -> dict[str, Any]:
    """By run, length and layer: for each head how many hold most of the sum, and how much the largest hold."""
    return {
        "share": MOST,
        "runs": [
            {"run": name, "spectra": [_plain(each) for each in same]}
            for name, same in groupby(found, key=lambda each: each.name)
        ],
    }


def _plain(each: Spectrum) -> dict[str, Any]:
    return {
        "length": each.length,
        "texts": each.texts,
        "layers": [
            {
                "attention": kind,
                "values": curves.shape[-1],
                "needed": needed.tolist(),
                "quarter": quarter.tolist(),
                "cumulative": curves.tolist(),
            }
            for kind, needed, quarter, curves in zip(
                each.kinds, each.needed, each.quarter, each.cumulative, strict=True
            )
        ],
    }


def draw(found: Sequence[Spectrum], path: Path) -> None:
    """A row for each run and length into an image file: curves by layer, and layers by heads."""
    figure(found).savefig(path, dpi=160)


def figure(found: Sequence[Spectrum]) -> Figure:
    drawn = Figure(figsize=(10.0, 3.6 * len(found) + 0.6), layout="constrained")
    grid = drawn.subplots(len(found), 2, squeeze=False, width_ratios=(3, 2))
    for (curves, heat), each in zip(grid, found, strict=True):
        _curves(curves, each)
        _heat(heat, each)
    told = [axes.get_legend_handles_labels() for axes in grid[:, 0]]
    most = max(told, key=lambda lines: len(lines[0]))  # of the deepest run: the others' lines are among its
    drawn.legend(*most, loc="outside upper left", ncols=7, frameon=False)
    return drawn


def _curves(axes: Axes, each: Spectrum) -> None:
    """A line a layer from dark to light, the mean over its heads, with their range as a band."""
    for layer, curves in enumerate(each.cumulative):
        numbers = np.arange(1, curves.shape[-1] + 1)
        colour = colormaps["viridis"](0.9 * layer / max(len(each.cumulative) - 1, 1))
        axes.plot(numbers, curves.mean(axis=0), color=colour, label=f"layer {layer + 1}")
        axes.fill_between(numbers, curves.min(axis=0), curves.max(axis=0), color=colour, alpha=0.15, linewidth=0)
    for size in sorted({*each.sizes}, reverse=True):
        numbers, quarter = np.arange(1, size + 1), quarter_of(size)
        alike = "all alike" if size == max(each.sizes) else None
        axes.plot(numbers, numbers / size, color="0.6", linestyle=":", label=alike)
        axes.axvline(quarter, color="0.6", linewidth=1, linestyle=(0, (4, 3)), zorder=0)
        axes.annotate(
            f"{quarter:,}", (quarter, 0), xytext=(3, 3), textcoords="offset points", fontsize="small", color="0.35"
        )
    axes.set_title(f"{each.name}, {name_length(each.length)} tokens")
    axes.set_xlabel("largest singular values")
    axes.set_ylabel("share of their sum")
    axes.set_xlim(0, each.length)
    axes.set_ylim(0, 1.02)
    clear(axes)


def _heat(axes: Axes, each: Spectrum) -> None:
    """The share held by the largest quarter, layers downwards and heads to the right."""
    quarter = each.quarter
    image = axes.imshow(quarter, vmin=0.25, vmax=1, cmap="cividis", aspect="auto")
    axes.set_xticks(*_names(quarter.shape[1]))
    axes.set_yticks(*_names(quarter.shape[0]))
    axes.set_xlabel("head")
    axes.set_ylabel("layer")
    largest = " or ".join(f"{quarter_of(size):,}" for size in dict.fromkeys(each.sizes))
    axes.set_title(f"share of the largest {largest}")
    if quarter.size <= NUMBERED:
        for (layer, head), share in np.ndenumerate(quarter):
            colour = "black" if share > 0.7 else "white"
            axes.text(head, layer, f"{share:.2f}", ha="center", va="center", fontsize="small", color=colour)
    assert axes.figure is not None
    axes.figure.colorbar(image, ax=axes)


def _names(count: int) -> tuple[list[int], list[str]]:
    """Places from 0 and their names from 1, fewer where there are many."""
    places = list(range(0, count, -(-count // 12)))
    return places, [str(place + 1) for place in places]
