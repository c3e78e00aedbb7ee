"""Models of every kind of state and every option, and of sizes that fill the vectors of native code or leave a rest."""

import copy
from typing import Any

import pytest
import torch
from models import FORMS, LIKE_LLAMA, stirred

from lmlong.decode.choice import fast_engine, why_no_fast_engine
from lmlong.model.base import quantize
from lmlong.model.language_model import LanguageModel
from lmlong.recipe import Attention, Downsample, Favor, Model, NgramEmbedding

VOCABULARY = 258
LINEAR = Attention(kind="linear")
MIXED = Attention(kind=["linear", "window", "delta"], window=5)
SINK = Attention(kind=["window", "linear"], window=6, window_sink=True)
SOFTMAX = Attention(kind="softmax")
GROWING = Attention(kind=["linear", "softmax"])
BESIDE = Attention(kind=["linear", "delta"], parallel_window=5)

WIDTHS: dict[str, dict[str, Any]] = {
    "three queries for a key": {"heads": 9, "kv_heads": 3, "head_dim": 48, "attention": SOFTMAX},
    "one key": {"heads": 8, "kv_heads": 1, "head_dim": 24, "value_dim": 37, "attention": SOFTMAX},
    "long values": {"heads": 4, "kv_heads": 2, "head_dim": 10, "value_dim": 72, "attention": SOFTMAX, "convolution": 0},
    "one head": {"heads": 1, "head_dim": 64, "attention": SOFTMAX},
    "mixed": {"heads": 4, "kv_heads": 2, "head_dim": 16, "attention": MIXED, "layers": 3},
    "window beside both": {"heads": 2, "attention": BESIDE},
    "short values and a sink": {"heads": 9, "kv_heads": 3, "head_dim": 16, "value_dim": 10, "attention": SINK},
}
"""Caches whose vectors are filled or not, of one to eight query heads for each key."""

HOURGLASSES: dict[str, dict[str, Any]] = {
    "mean of blocks": {"layers": 3, "downsample": Downsample(factor=3)},
    "max of blocks": {"layers": 3, "downsample": Downsample(factor=3, kind="max")},
    "conv of blocks": {"layers": 3, "downsample": Downsample(factor=3, kind="conv")},
    "hourglass": {"layers": 4, "attention": MIXED, "downsample": Downsample(factor=2)},
    "growing hourglass": {"layers": 4, "attention": GROWING, "downsample": Downsample(factor=2)},
    "hourglass and tables": {
        "layers": 4,
        "attention": BESIDE,
        "downsample": Downsample(factor=2),
        "ngram_embedding": NgramEmbedding(orders=[4], rows=9, width=70),
    },
}
SHAPES: dict[str, dict[str, Any]] = {
    **{name: {"width": 32, "heads": 4, **form} for name, form in FORMS.items()},
    "rotary": {"positions": "rotary"},
    "ends that fill no vector": {"width": 40, "heads": 5, "mlp_ratio": 2.0},
    "few channels of values": {"width": 24, "heads": 3, "head_dim": 16, "value_dim": 5, "attention": MIXED},
    "long convolution": {"width": 35, "heads": 5, "positions": "none", "convolution": 64},
    "like Llama": {"heads": 4, **LIKE_LLAMA},
    "mixed like Llama": {"heads": 4, "attention": MIXED, **LIKE_LLAMA, "head_norm": True},
    "softmax like Llama": {"heads": 4, "attention": SOFTMAX, **LIKE_LLAMA, "add_ngram": [1]},
    "softmax without positions": {"attention": SOFTMAX, "positions": "none"},
    "few features": {"heads": 1, "attention": Attention(kind="linear", feature_map="favor", favor=Favor(features=7))},
    # exponents that must be held down
    "wide": {"width": 512, "heads": 2, "attention": Attention(kind="linear", feature_map="favor")},
    "rotary windows beside": {"attention": BESIDE, "positions": "rotary", "heads": 4, "kv_heads": 2},
    "unplaced windows beside": {"attention": BESIDE, "positions": "none", "value_dim": 3},
    "added heads": {"layers": 3, "attention": MIXED, "add_ngram": [1, 3]},
    **WIDTHS,
    **HOURGLASSES,
}
every_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
KEPT = pytest.mark.parametrize("kept", ["32", "bf16", "int8", "int4"])


def shaped(
    shape: dict[str, Any], kept: str = "32", deviation: float = 0.5, vocabulary: int = VOCABULARY
) -> LanguageModel:
    torch.manual_seed(0)  # of random features
    options = Model(**{"width": 16, "layers": 2, "heads": 2, "attention": LINEAR, **shape})
    model = stirred(LanguageModel(options, vocabulary), deviation).eval()
    if kept != "32":
        quantize(model, kept)
    return model


def compiled(model: LanguageModel) -> LanguageModel:
    why = why_no_fast_engine(model)
    assert why is None, why
    other = copy.deepcopy(model)
    other.engine = fast_engine(other, tried=False)  # test_fail_closed.py has the trials
    return other
