"""Attentions and feature maps by their names in recipes. A new one needs a line here and in lmlong/recipe/kinds.py.

Plug-ins are registered in the same dicts (plugins.py).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from lmlong import recipe
from lmlong.attention.base import CausalAttention
from lmlong.attention.delta.features import INNER
from lmlong.attention.delta.layer import DeltaAttention
from lmlong.attention.encoder.base import EncoderAttention
from lmlong.attention.encoder.kinds import BidirectionalLinearAttention, EfficientAttention, FullAttention
from lmlong.attention.encoder.linformer import linformer_layers
from lmlong.attention.favor import Favor
from lmlong.attention.feature_maps import Cosine, Elu, FeatureMap, Hedgehog, Relu, Softmax, Taylor
from lmlong.attention.linear.layer import LinearAttention
from lmlong.attention.ngram.layer import NgramAttention
from lmlong.attention.parallel_window.layer import ParallelWindow
from lmlong.attention.recurrence import Recurrence
from lmlong.attention.softmax.layer import SoftmaxAttention
from lmlong.attention.window.layer import WindowAttention
from lmlong.native.decode.kind import DecodeKind

FEATURE_MAPS: dict[str, Callable[[int, int, recipe.Attention], FeatureMap]] = {
    "elu": lambda heads, head_dim, options: Elu(head_dim),
    "relu": lambda heads, head_dim, options: Relu(head_dim),
    "cosine": lambda heads, head_dim, options: Cosine(head_dim),
    "softmax": lambda heads, head_dim, options: Softmax(head_dim),
    "hedgehog": lambda heads, head_dim, options: Hedgehog(heads, head_dim),
    "taylor": lambda heads, head_dim, options: Taylor(heads, head_dim, options.taylor.width),
    "favor": lambda heads, head_dim, options: Favor(
        heads, head_dim, options.favor.features or 2 * head_dim, options.favor.form, options.favor.norms
    ),
}


def _recurrence(
    kind: type[Recurrence[Any]],
    heads: int,
    head_dim: int,
    value_dim: int,
    feature_map: FeatureMap,
    options: recipe.Attention,
) -> CausalAttention:
    recurrence = kind(heads, head_dim, value_dim, feature_map, options.decay, options.longest_memory)
    window = options.parallel_window
    return recurrence if window is None else ParallelWindow(recurrence, window)


CAUSAL: dict[str, Callable[[int, int, int, recipe.Attention], CausalAttention]] = {
    "linear": lambda heads, head_dim, value_dim, options: _recurrence(
        LinearAttention,
        heads,
        head_dim,
        value_dim,
        FEATURE_MAPS[options.feature_map](heads, head_dim, options),
        options,
    ),
    "delta": lambda heads, head_dim, value_dim, options: _recurrence(
        DeltaAttention, heads, head_dim, value_dim, INNER[options.delta.feature_map](head_dim), options
    ),
    "window": lambda heads, head_dim, value_dim, options: WindowAttention(heads, head_dim, value_dim, options.window),
    "softmax": lambda heads, head_dim, value_dim, options: SoftmaxAttention(heads, head_dim, value_dim),
    "ngram": lambda heads, head_dim, value_dim, options: NgramAttention(
        heads, head_dim, value_dim, options.ngram.sizes, options.ngram.buckets
    ),
}
"""(heads, head dim, value dim, options) -> the attention of a layer."""


def native_kinds() -> dict[str, DecodeKind[Any]]:
    """Return the kinds that the native decode step is compiled with, by the names of their C++ structs: the built-in
    attentions, with and without a parallel window. Plug-ins decode by torch."""
    forms = recipe.Attention(), recipe.Attention(parallel_window=2)
    built_in = [make for kind, make in CAUSAL.items() if not recipe.ATTENTION_KINDS[kind].plugin]
    with torch.random.fork_rng(devices=[]):
        kinds = [make(1, 2, 2, options).native_decode for make in built_in for options in forms]
    return {kind.name: kind for kind in kinds if kind is not None}


ENCODER: dict[str, Callable[[Sequence[int], int, int, recipe.Attention], list[EncoderAttention]]] = {
    "full": lambda lengths, heads, head_dim, options: [FullAttention() for _ in lengths],
    "linformer": lambda lengths, heads, head_dim, options: linformer_layers(
        lengths, heads, head_dim, options.linformer
    ),
    "efficient": lambda lengths, heads, head_dim, options: [EfficientAttention() for _ in lengths],
    "linear": lambda lengths, heads, head_dim, options: [
        BidirectionalLinearAttention(FEATURE_MAPS[options.feature_map](heads, head_dim, options)) for _ in lengths
    ],
}
"""(longest input of each layer, heads, head dim, options) -> the attentions of all layers, built together because
Linformer layers may share matrices."""
