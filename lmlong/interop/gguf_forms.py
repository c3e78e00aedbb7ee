"""What llama.cpp's files of an architecture hold in another way than transformers: names, values and orders.

N outputs, G heads of keys, R heads of values that share each.
"""

import re
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from lmlong.errors import CheckpointError
from lmlong.interop.architecture import Architecture, Config
from lmlong.interop.delta_hybrids import Qwen, QwenConfig
from lmlong.interop.llama import Llama, neighbours_to_halves
from lmlong.io.checked import shown

OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
"""llama.cpp's names of weights, and transformers' names."""

KEYS = {
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "intermediate_size": "feed_forward_length",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
}
"""transformers' names of a configuration's values, and llama.cpp's names."""


class GgufForm:
    """The form of an architecture."""

    kind: ClassVar[str]
    """The value of general.architecture."""
    architecture: Architecture[Any]
    layer: ClassVar[Mapping[str, str]] = LAYER
    keys: ClassVar[Mapping[str, str]] = KEYS

    def name(self, own: str) -> str:
        """Return transformers' name for llama.cpp's name of a weight. Return an unknown name unchanged."""
        found = re.fullmatch(r"blk\.(\d+)\.(.+)", own)
        if found is None:
            return OUTER.get(own, own)
        return f"model.layers.{found[1]}.{self.layer[found[2]]}" if found[2] in self.layer else own

    def values(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values of config.json, by the names of transformers."""
        if (scaling := fields.get(f"{self.kind}.rope.scaling.type", "none")) != "none":
            raise CheckpointError(
                f"{self.kind}.rope.scaling.type is {shown(scaling)}, which is not supported in GGUF. "
                "Import the model's folder."
            )
        return {name: fields[key] for name, key in self.full_keys.items() if key in fields}

    @property
    def full_keys(self) -> dict[str, str]:
        return {name: f"{self.kind}.{key}" for name, key in self.keys.items()}

    def shape(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape that a weight has in transformers."""
        return shape

    def restored(self, name: str, weight: Tensor, config: Any) -> Tensor:
        """Return a weight as transformers has it."""
        return weight


class LlamaForm(GgufForm):
    kind = "llama"
    architecture = Llama()
    keys: ClassVar = {**KEYS, "head_dim": "rope.dimension_count", "rope_theta": "rope.freq_base"}

    def restored(self, name: str, weight: Tensor, config: Any) -> Tensor:
        return neighbours_to_halves(name, weight, config)


class QwenForm(GgufForm):
    """Gains of norms are whole, A is -exp(A_log), and heads of values are in the order of ggml's broadcasting: the
    first of each head of keys, then the second of each."""

    kind = "qwen35"
    architecture = Qwen()
    layer: ClassVar = {
        **LAYER,
        "post_attention_norm.weight": LAYER["ffn_norm.weight"],
        "attn_q_norm.weight": "self_attn.q_norm.weight",
        "attn_k_norm.weight": "self_attn.k_norm.weight",
        "attn_qkv.weight": "linear_attn.in_proj_qkv.weight",
        "attn_gate.weight": "linear_attn.in_proj_z.weight",
        "ssm_alpha.weight": "linear_attn.in_proj_a.weight",
        "ssm_beta.weight": "linear_attn.in_proj_b.weight",
        "ssm_conv1d.weight": "linear_attn.conv1d.weight",
        "ssm_a": "linear_attn.A_log",
        "ssm_dt.bias": "linear_attn.dt_bias",
        "ssm_norm.weight": "linear_attn.norm.weight",
        "ssm_out.weight": "linear_attn.out_proj.weight",
    }
    keys: ClassVar = {
        **KEYS,
        "head_dim": "attention.key_length",
        "linear_conv_kernel_dim": "ssm.conv_kernel",
        "linear_key_head_dim": "ssm.state_size",
        "linear_num_key_heads": "ssm.group_count",
        "linear_num_value_heads": "ssm.time_step_rank",
        "full_attention_interval": "full_attention_interval",
    }

    def values(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        values, of = super().values(fields), {key: fields.get(f"{self.kind}.{key}") for key in self.computed}
        inner, heads, head_dim = of["ssm.inner_size"], values.get("linear_num_value_heads"), values.get("head_dim")
        if isinstance(inner, int) and isinstance(heads, int) and heads > 0:
            values["linear_value_head_dim"] = inner // heads
        rope: dict[str, Any] = {"rope_theta": of["rope.freq_base"]}
        if isinstance(of["rope.dimension_count"], int) and isinstance(head_dim, int) and head_dim > 0:
            rope["partial_rotary_factor"] = of["rope.dimension_count"] / head_dim
        values["rope_parameters"] = {key: value for key, value in rope.items() if value is not None}
        more = of["nextn_predict_layers"]
        if isinstance(more, int) and isinstance(values.get("num_hidden_layers"), int):
            values["num_hidden_layers"] -= more  # layers that predict several tokens
        return values

    computed = ("ssm.inner_size", "rope.freq_base", "rope.dimension_count", "nextn_predict_layers")

    def shape(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (shape[0], 1, *shape[1:]) if name.endswith("conv1d.weight") and len(shape) == 2 else shape

    def restored(self, name: str, weight: Tensor, config: Any) -> Tensor:
        _, _, part = name.partition(".linear_attn.")
        if not part:
            return weight - 1 if name.endswith("norm.weight") else weight
        if part == "norm.weight":
            return weight
        if part == "A_log":
            weight = (-weight).log()
        if part in ("in_proj_qkv.weight", "conv1d.weight"):
            keys = weight.shape[0] - config.linear_num_value_heads * config.linear_value_head_dim
            return torch.cat([weight[:keys], _beside_keys(weight[keys:], config)])
        if part == "out_proj.weight":
            return _beside_keys(weight.mT, config).mT.contiguous()
        return _beside_keys(weight, config)


def _beside_keys(weight: Tensor, config: QwenConfig) -> Tensor:
    """Return the rows of heads of values (R, G) in the order (G, R)."""
    keys = config.linear_num_key_heads
    heads = weight.unflatten(0, (config.linear_num_value_heads // keys, keys, -1))
    return heads.transpose(0, 1).reshape(weight.shape)


FORMS: dict[str, GgufForm] = {form.kind: form for form in (LlamaForm(), QwenForm())}


def is_of_more_tokens(own: str, config: Config) -> bool:
    """Return whether a weight, by llama.cpp's name, is of the last layers, which predict several tokens."""
    found = re.match(r"blk\.(\d+)\.", own)
    return found is not None and int(found[1]) >= config.num_hidden_layers
