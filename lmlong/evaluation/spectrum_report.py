"""Spectra of attention as a table, as JSON and as a plot."""

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import numpy as np

from lmlong.evaluation.spectrum import MOST, Spectrum, quarter_of
from lmlong.recipe.lengths import name_length
from lmlong.report.figure import Figure, Line, Mark, Panel, Style
from lmlong.report.json_values import json_values
from lmlong.report.table import Column, format_table, plural

COLUMNS = [
    Column("layer", 7, value="number"),
    Column("  attention", 12, align="<", value=lambda layer: f"  {layer.attention}"),
    Column(f"hold {MOST:.0%}", 10, ".1f", value=lambda layer: layer.needed.mean()),
    Column("of n", 7, ".0%", value=lambda layer: layer.needed.mean() / layer.values),
    Column("heads", 16, value=lambda layer: f"{layer.needed.min():.0f} to {layer.needed.max():.0f}"),
    Column("n/4 hold", 11, ".3f", value=lambda layer: layer.quarter.mean()),
    Column("heads", 16, value=lambda layer: f"{layer.quarter.min():.3f} to {layer.quarter.max():.3f}"),
]


def table(spectra: Sequence[Spectrum]) -> str:
    """Return a line for each layer, by run and length, at most 80 columns wide but for the names."""
    notes = [
        "",
        "means over the heads and texts, with the range of the heads; where all singular",
        f"values are alike, {MOST:.0%} of n of them hold {MOST:.0%} and n / 4 hold 0.250",
    ]
    return "\n".join(["\n\n".join(map(_section, spectra)), *notes])


def _section(spectrum: Spectrum) -> str:
    texts = f"{plural(spectrum.texts, 'text')} of n = {spectrum.length:,} tokens"
    title = f"{spectrum.name}: singular values of attention in {texts}"
    return "\n".join([title, *_block_layers(spectrum), *format_table(COLUMNS, spectrum.layers)])


def _block_layers(spectrum: Spectrum) -> list[str]:
    """Return a line about the layers that read blocks of tokens, if there are any."""
    shorter = [layer for layer in spectrum.layers if layer.values < spectrum.length]
    if not shorter:
        return []
    first, last = shorter[0].number, shorter[-1].number
    layers = f"layers {first} to {last} read" if first < last else f"layer {first} reads"
    return [f"{layers} blocks of them: n = {shorter[0].values:,} there"]


def to_json(spectra: Sequence[Spectrum]) -> dict[str, Any]:
    """Return the singular values of each head by run, length and layer, and how many hold most of their sum."""
    by_run = groupby(spectra, key=lambda spectrum: spectrum.name)
    return json_values({"share": MOST, "runs": [{"run": name, "spectra": [*same]} for name, same in by_run]})


def figure(spectra: Sequence[Spectrum]) -> Figure:
    """Return a panel for each run and length, with a curve for each layer."""
    depths = [len(spectrum.layers) for spectrum in spectra]
    return Figure(
        [[_curves(spectrum)] for spectrum in spectra],
        size=(8.0, 3.6 * len(spectra) + 0.6),
        legend_columns=6,
        legend_row=depths.index(max(depths)),  # the deepest run has all layers of the legend
    )


def _curves(spectrum: Spectrum) -> Panel:
    """Return a line for each layer from dark to light: the mean over its heads, with their range as a band."""
    lines = []
    for layer in spectrum.layers:
        looks = Style(0.9 * (layer.number - 1) / max(len(spectrum.layers) - 1, 1))
        curves = layer.cumulative
        mean, low, high = curves.mean(axis=0), curves.min(axis=0), curves.max(axis=0)
        lines.append(Line(f"layer {layer.number}", np.arange(1, layer.values + 1), mean, looks, low, high))
    sizes = sorted({layer.values for layer in spectrum.layers}, reverse=True)
    for size in sizes:
        numbers = np.arange(1, size + 1)
        lines.append(Line("all alike" if size == sizes[0] else None, numbers, numbers / size, Style("0.6", ":")))
    return Panel(
        lines,
        title=f"{spectrum.name}, {name_length(spectrum.length)} tokens",
        x_label="largest singular values",
        y_label="share of their sum",
        marks=[Mark(quarter_of(size), f"{quarter_of(size):,}") for size in sizes],
        y_range=(0, 1.02),
    )
