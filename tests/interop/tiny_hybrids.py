"""Tiny configurations of pretrained hybrids, and folders of them with random weights."""

from functools import cache
from pathlib import Path
from typing import Any

import torch
from models import stirred
from torch import Tensor

from lmlong import recipe
from lmlong.interop.architecture import Architecture
from lmlong.interop.hf.config import weights_of
from lmlong.interop.hf_folder import ARCHITECTURES, without_null
from lmlong.model.build import build

from .tiny_llama import write_folder

COMMON = {"vocab_size": 300, "hidden_size": 48, "intermediate_size": 40, "max_position_embeddings": 64}
DELTA = {"linear_key_head_dim": 12, "linear_value_head_dim": 20, "linear_conv_kernel_dim": 4}
HYBRIDS: dict[str, dict[str, Any]] = {
    "Qwen3_5ForCausalLM": {
        **COMMON,
        **DELTA,
        "model_type": "qwen3_5_text",
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
        "tie_word_embeddings": True,
    },
    "OlmoHybridForCausalLM": {
        **COMMON,
        **DELTA,
        "model_type": "olmo_hybrid",
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 4,
        "rope_parameters": None,
        "tie_word_embeddings": False,
        "pad_token_id": 0,
        "eos_token_id": 2,
    },
    "Lfm2ForCausalLM": {
        **COMMON,
        "model_type": "lfm2",
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "layer_types": ["conv", "conv", "full_attention", "conv"],
        "block_multiple_of": 8,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
}
"""The values of config.json, by the class of transformers."""


def architecture_of(name: str) -> Architecture[Any]:
    return next(each for each in ARCHITECTURES if each.name == name)


@cache
def source(name: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return a configuration and random weights by the names of transformers."""
    architecture, config = architecture_of(name), {"architectures": [name], **HYBRIDS[name]}
    options = recipe.Model(**architecture.options(architecture.config.model_validate(without_null(config))))
    model = stirred(build(recipe.Recipe(name="x", model=options), config["vocab_size"]), 0.3)
    return config, weights_of({key: value.detach() for key, value in model.state_dict().items()}, architecture, options)


def write_hybrid(folder: Path, name: str, **changes: Any) -> Path:
    config, weights = source(name)
    return write_folder(folder, {**config, **changes}, weights)


def bf16(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return weights as models are published: rates in float32, all others in bfloat16."""
    return {name: weight if name.endswith("A_log") else weight.to(torch.bfloat16) for name, weight in weights.items()}
