"""Models for tests."""

from typing import Any, TypeVar

import torch
from torch import nn

from lmlong.model.ngram_embedding import NgramEmbedding
from lmlong.recipe import Rope, RopeScaling

Model = TypeVar("Model", bound=nn.Module)


LIKE_LLAMA: dict[str, Any] = {
    "kv_heads": 2,
    "convolution": 0,
    "positions": "rotary",
    "rope": Rope(base=500.0, scaling=RopeScaling(factor=3.0, original_length=40)),
    "output_gate": False,
    "head_norm": False,
    "norm_epsilon": 1e-3,
    "embedding_scale": 0.7,
    "tied_output": False,
    "mlp_width": 20,
}
"""All that the blocks of a Llama do in another way, for models of a multiple of two heads."""


def kinds(window: int) -> dict[str, dict[str, object]]:
    """Options of every kind of attention that a recipe has, and of what changes how it computes."""
    return {
        "linear": {"kind": "linear"},
        "channel": {"kind": "linear", "decay": "channel"},
        "no decay": {"kind": "linear", "decay": "none"},
        "favor": {"kind": "linear", "feature_map": "favor"},
        "delta": {"kind": "delta"},
        "window": {"kind": "window", "window": window},
        "window and sink": {"kind": "window", "window": window, "window_sink": True},
        "parallel window": {"kind": "linear", "parallel_window": window},
        "softmax": {"kind": "softmax"},
        "ngram": {"kind": "ngram"},
    }


def stirred(model: Model, deviation: float = 1.0, seed: int = 0) -> Model:
    """Draw every weight anew, gates, gains and output projections too: a fresh model rests at harmless 0s and 1s, where
    nothing a block does reaches the logits."""
    draw = torch.Generator().manual_seed(seed)
    for weight in model.parameters():
        nn.init.normal_(weight, std=deviation, generator=draw)
    for module in model.modules():
        if isinstance(module, NgramEmbedding):
            nn.init.normal_(module.table, std=deviation, generator=draw)
    return model
