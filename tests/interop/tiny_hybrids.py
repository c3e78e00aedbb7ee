"""Tiny configurations of pretrained hybrids, and folders of them with random weights."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import torch
from models import stirred
from torch import Tensor

from lmlong import recipe
from lmlong.interop.architecture import Architecture
from lmlong.interop.hf.config import weights_of
from lmlong.interop.hf_folder import ARCHITECTURES, without_null
from lmlong.model.build import build

from .tiny_llama import add_pieces, write_folder

NONE: Mapping[str, Tensor] = MappingProxyType({})
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
def source(name: str, **changes: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return a configuration and random weights by the names of transformers."""
    architecture, config = architecture_of(name), {"architectures": [name], **HYBRIDS[name], **changes}
    options = recipe.Model(**architecture.options(architecture.config.model_validate(without_null(config))))
    model = stirred(build(recipe.Recipe(name="x", model=options), config["vocab_size"]), 0.3)
    return config, weights_of({key: value.detach() for key, value in model.state_dict().items()}, architecture, options)


def write_hybrid(folder: Path, name: str, **changes: Any) -> Path:
    config, weights = source(name)
    return write_folder(folder, {**config, **changes}, weights)


def write_qwen_gguf(
    path: Path,
    config: dict[str, Any],
    given: dict[str, Tensor],
    kind: Any = None,
    more: Mapping[str, Tensor] = NONE,
    writing: type[gguf.GGUFWriter] = gguf.GGUFWriter,
) -> Path:
    """Write a GGUF file as llama.cpp's converter does, with the matrices in a type of gguf; float32 without. `more`:
    weights of a layer after the others, which predicts several tokens."""
    writer, keys, values = writing(path, "qwen35"), config["linear_num_key_heads"], config["linear_num_value_heads"]
    value_dim, rope = config["linear_value_head_dim"], config["rope_parameters"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"] + bool(more))
    if more:
        writer.add_nextn_predict_layers(1)
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config.get("rms_norm_eps", 1e-6))
    writer.add_rope_freq_base(rope["rope_theta"])
    rotated = int(config["head_dim"] * rope["partial_rotary_factor"])
    writer.add_rope_dimension_count(rotated)
    writer.add_rope_dimension_sections([rotated // 2, 0, 0, 0])
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(keys)
    writer.add_ssm_time_step_rank(values)
    writer.add_ssm_inner_size(values * value_dim)
    writer.add_full_attention_interval(config.get("full_attention_interval", 4))
    add_pieces(writer, config["vocab_size"])

    def tiled(weight: Tensor) -> Tensor:
        return weight.unflatten(0, (keys, values // keys, -1)).transpose(0, 1).reshape(weight.shape)

    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN35, config["num_hidden_layers"])
    for name, whole in given.items():
        weight, own = whole.float(), names.get_name(name, try_suffixes=(".weight",))
        first = len(weight) - values * value_dim
        if name.endswith("A_log"):
            weight = tiled(-weight.exp())
        elif name.endswith("dt_bias"):
            weight, own = tiled(weight), names.get_name(name.replace("dt_bias", "dt_proj")) + ".bias"
        elif "conv1d" in name or "in_proj_qkv" in name:
            weight = torch.cat([weight[:first], tiled(weight[first:])]).squeeze(1)
        elif "linear_attn.in_proj" in name:
            weight = tiled(weight)
        elif "linear_attn.out_proj" in name:
            weight = tiled(weight.mT).mT
        elif name.endswith("norm.weight") and "linear_attn" not in name:
            weight = weight + 1
        data = weight.contiguous().numpy()
        if kind is not None and weight.ndim == 2 and "conv1d" not in name:
            writer.add_tensor(own, gguf.quants.quantize(data, kind), raw_dtype=kind)
        else:
            writer.add_tensor(own, data)
    for own, each in more.items():
        writer.add_tensor(own, each.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def bf16(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return weights as models are published: rates in float32, all others in bfloat16."""
    return {name: weight if name.endswith("A_log") else weight.to(torch.bfloat16) for name, weight in weights.items()}
