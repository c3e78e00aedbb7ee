"""Attentions by their names in recipes: one entry in lmlong/recipe/kinds.py for each folder with a causal attention.

Plug-ins are registered in the same dict (plugins.py).
"""

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import torch

from lmlong import recipe
from lmlong.attention.base import CausalAttention
from lmlong.attention.encoder.base import (
    BidirectionalLinearAttention,
    EfficientAttention,
    EncoderAttention,
    FullAttention,
)
from lmlong.attention.encoder.linformer import linformer_layers
from lmlong.attention.feature_map_registry import FEATURE_MAPS
from lmlong.native.decode.kind import DecodeKind

CAUSAL: dict[str, Callable[[int, int, int, recipe.Attention], CausalAttention[Any]]] = {
    kind: getattr(import_module(f"lmlong.attention.{kind}.layer"), about.layer).from_options
    for kind, about in recipe.ATTENTION_KINDS.items()
    if about.layer
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
