"""The singular values of attention matrices, layer by layer and head by head.

Keys and values can be shortened to k slots without loss, as Linformer does, if a few singular values hold most of their
sum (figure 1 of its paper). H heads, L layers, T tokens, or blocks of tokens in a layer that reads blocks.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lmlong.attention.base import CausalAttention
from lmlong.attention.encoder.base import EncoderAttention
from lmlong.data.token_file import TokenFile
from lmlong.errors import UsageError
from lmlong.evaluation import spans as cut
from lmlong.evaluation.state_health import watched
from lmlong.inference.trained_model import TrainedModel
from lmlong.model.base import TextModel
from lmlong.model.language_model import LanguageModel
from lmlong.recipe import Recipe
from lmlong.recipe.lengths import name_length
from lmlong.report.figure import Figure, Line, Mark, Panel, Style
from lmlong.report.json_values import json_keys
from lmlong.report.progress import Progress
from lmlong.report.report import Report, Table
from lmlong.report.table import Column, plural

LENGTHS = (512,)
"""The default lengths: that of the paper's figure."""

TEXTS = 8

MOST = 0.9
"""The share of their sum that the counted singular values hold."""


@json_keys("attention", "values", "needed", "quarter", "cumulative")
class LayerSpectrum(NamedTuple):
    """The singular values of one layer's matrices."""

    number: int  # of the layer, from 1
    attention: str
    cumulative: np.ndarray  # (H, T): share of the sum held by the largest, mean over texts
    needed: np.ndarray  # (H,) how many values hold MOST of the sum, mean over texts

    @property
    def values(self) -> int:
        return self.cumulative.shape[-1]

    @property
    def quarter(self) -> np.ndarray:
        """The share that the largest quarter of them holds, (H,)."""
        return self.cumulative[:, quarter_of(self.values) - 1]


@json_keys("length", "texts", "layers")
class Spectrum(NamedTuple):
    """The singular values of one model's attention matrices on texts of one length."""

    name: str
    length: int
    texts: int
    layers: list[LayerSpectrum]


def measure_spectra(
    name: str, loaded: TrainedModel, text: TokenFile, lengths: Sequence[int] = LENGTHS, texts: int = TEXTS
) -> list[Spectrum]:
    """Return the spectrum at each length, on about `texts` stretches of the text, spread over its documents."""
    _check(name, loaded.recipe, min(lengths), max(lengths))
    documents = cut.documents_of(text)
    for length in lengths:
        if not cut.reached(documents, 0, length):
            raise UsageError(
                f"--lengths: the longest document has {int(documents.sizes.max(initial=0)):,} tokens, fewer than "
                f"{length:,}. Give shorter lengths, or more text (--data)."
            )
    stretches = {length: cut.choose_blocks(documents, 0, length, texts * length, 1) for length in lengths}
    spectra = []
    with Progress(name, sum(len(blocks.first) for blocks in stretches.values()), "texts") as progress:
        for length, blocks in stretches.items():
            progress.begin(f"{name}: spectrum at {name_length(length)}")
            curves = []
            for first in blocks.first:
                tokens = text.tokens[first : first + length].astype(np.int64)
                curves.append(cumulative(attention_matrices(loaded.model, tokens)))
                progress.update()
            by_layer = zip(loaded.recipe.model.kinds, map(np.stack, zip(*curves, strict=True)), strict=True)
            layers = [
                LayerSpectrum(number, str(kind), of_texts.mean(axis=0), count_needed(of_texts).mean(axis=0))
                for number, (kind, of_texts) in enumerate(by_layer, 1)
            ]
            spectra.append(Spectrum(name, length, len(curves), layers))
    return spectra


def _check(name: str, recipe: Recipe, shortest: int, longest: int) -> None:
    """Raise a UsageError for texts shorter than a block, longer than the run's Linformer, or a Linformer that has no
    matrix."""
    if recipe.objective == "causal" and shortest < recipe.model.factor:
        raise UsageError(
            f"--lengths: {shortest} tokens are fewer than a block of {recipe.model.factor}, so the layers that read "
            "blocks have no input. Give longer ones."
        )
    if "linformer" not in recipe.model.kinds:
        return
    if (projection := recipe.model.attention.linformer.projection) not in ("linear", "mean"):
        raise UsageError(
            f"{name}: its Linformer projects by {projection}, which is not a matrix from values to outputs. Name a run "
            "with linear or mean."
        )
    if longest > recipe.text.sequence_length:
        raise UsageError(
            f"--lengths: {longest:,} tokens are more than the {recipe.text.sequence_length:,} of the run's Linformer. "
            "Give shorter ones."
        )


@torch.no_grad()
def attention_matrices(model: TextModel, tokens: np.ndarray) -> list[Tensor]:
    """Return the matrix of each layer (H, T, T) for a text that is read from an empty state."""
    matrices = []

    def look(attention: CausalAttention | EncoderAttention, inputs: tuple[Any, ...]) -> None:
        q, k, _, *rest = inputs
        if isinstance(attention, CausalAttention):
            del rest[0]  # the state, which is empty
        matrices.append(matrix(attention, q, k, *rest)[0])

    attentions = [module for module in model.modules() if isinstance(module, CausalAttention | EncoderAttention)]
    aligned = model.whole_blocks() if isinstance(model, LanguageModel) else nullcontext()
    with watched(attentions, look), aligned:
        model(torch.from_numpy(tokens)[None].to(model.embedding.weight.device))
    return matrices


def matrix(attention: CausalAttention | EncoderAttention, q: Tensor, k: Tensor, *rest: Any) -> Tensor:
    """Return the matrix A of y = A v, (B, H, T, T): the output for v = the identity."""
    identity = torch.eye(k.shape[2], dtype=q.dtype, device=q.device).expand(*q.shape[:2], -1, -1)
    return attention.reference(q, k, identity, *rest)


def cumulative(matrices: Sequence[Tensor]) -> list[np.ndarray]:
    """Return by layer (H, T) the share of their sum that the largest singular values hold."""
    curves = []
    for layer in matrices:
        values = torch.linalg.svdvals(layer.cpu().double()).numpy()
        curves.append(values.cumsum(axis=-1) / values.sum(axis=-1, keepdims=True))
    return curves


def quarter_of(size: int) -> int:
    """Return a quarter of a number, at least 1."""
    return max(size // 4, 1)


def count_needed(curves: np.ndarray) -> np.ndarray:
    """Return the number of singular values that hold MOST of the sum, (..., T) -> (...)."""
    return (curves < MOST - 1e-12).sum(axis=-1) + 1


COLUMNS = [
    Column("layer", 7, value="number"),
    Column("  attention", 12, align="<", value=lambda layer: f"  {layer.attention}"),
    Column(f"hold {MOST:.0%}", 10, ".1f", value=lambda layer: layer.needed.mean()),
    Column("of n", 7, ".0%", value=lambda layer: layer.needed.mean() / layer.values),
    Column("heads", 16, value=lambda layer: f"{layer.needed.min():.0f} to {layer.needed.max():.0f}"),
    Column("n/4 hold", 11, ".3f", value=lambda layer: layer.quarter.mean()),
    Column("heads", 16, value=lambda layer: f"{layer.quarter.min():.3f} to {layer.quarter.max():.3f}"),
]


def spectrum_report(spectra: Sequence[Spectrum]) -> Report:
    """Return a line for each layer, by run and length; in JSON the curve of each head, and how many singular values
    hold most of the sum."""
    note = (
        "means over the heads and texts, with the range of the heads; where all singular\n"
        f"values are alike, {MOST:.0%} of n of them hold {MOST:.0%} and n / 4 hold 0.250"
    )
    by_run = groupby(spectra, key=lambda spectrum: spectrum.name)
    values = {"share": MOST, "runs": [{"run": name, "spectra": list(same)} for name, same in by_run]}
    return Report([*map(_table, spectra), note], values, lambda: figure(spectra))


def _table(spectrum: Spectrum) -> Table:
    texts = f"{plural(spectrum.texts, 'text')} of n = {spectrum.length:,} tokens"
    title = f"{spectrum.name}: singular values of attention in {texts}\n{_block_layers(spectrum)}"
    return Table(title, COLUMNS, spectrum.layers)


def _block_layers(spectrum: Spectrum) -> str:
    """Return a line about the layers that read blocks of tokens, if there are any."""
    shorter = [layer for layer in spectrum.layers if layer.values < spectrum.length]
    if not shorter:
        return ""
    first, last = shorter[0].number, shorter[-1].number
    layers = f"layers {first} to {last} read" if first < last else f"layer {first} reads"
    return f"{layers} blocks of them: n = {shorter[0].values:,} there"


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
