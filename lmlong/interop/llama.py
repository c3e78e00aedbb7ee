"""Llama (Touvron et al. 2023)."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from lmlong import recipe
from lmlong.errors import CheckpointError
from lmlong.interop.architecture import (
    Architecture,
    Base,
    Config,
    Part,
    RopeParameters,
    Size,
    mlp_parts,
    plain_base,
    softmax_parts,
    softmax_values,
)

LLAMA3_ROPE = {
    "factor": "factor",
    "low_freq_factor": "low_frequency_factor",
    "high_freq_factor": "high_frequency_factor",
    "original_max_position_embeddings": "original_length",
}
"""The parameters of rope type llama3, and the equal options of lmlong's recipe.RopeScaling."""


class LlamaConfig(Config):
    """The values of a Llama's config.json."""

    head_dim: Size | None = None
    rope_theta: Base = 10_000.0
    rope_scaling: RopeParameters | None = None


class Llama(Architecture[LlamaConfig]):
    name = "LlamaForCausalLM"
    config = LlamaConfig

    def options(self, config: LlamaConfig) -> dict[str, Any]:
        return {
            "width": config.hidden_size,
            "layers": config.num_hidden_layers,
            "heads": config.num_attention_heads,
            "kv_heads": config.key_value_heads,
            "head_dim": config.head_dim or config.default_head_dim,
            "attention": recipe.Attention(kind="softmax"),
            "convolution": 0,
            "positions": "rotary",
            "rope": _rope(config),
            "output_gate": False,
            "head_norm": False,
            "norm_epsilon": config.rms_norm_eps,
            "embedding_scale": 1.0,
            "tied_output": config.tie_word_embeddings,
            "mlp_width": config.intermediate_size,
        }

    def layer(self, model: recipe.Model, kind: str) -> Mapping[str, Part]:
        return {
            "mixer.norm.weight": Part(["input_layernorm.weight"]),
            **softmax_parts(model, norms=None),
            **mlp_parts(model, "post_attention_layernorm.weight"),
        }

    def values(self, model: recipe.Model) -> dict[str, Any]:
        scaling = model.rope.scaling
        rope: dict[str, Any] = {"rope_type": "default", "rope_theta": model.rope.base}
        if scaling:
            rope |= {"rope_type": "llama3", **{key: getattr(scaling, option) for key, option in LLAMA3_ROPE.items()}}
        return {
            "model_type": "llama",
            **softmax_values(model),
            "head_dim": model.head_dims.key,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "rope_parameters": rope,
            "rope_theta": model.rope.base,
        }


def _rope(config: LlamaConfig) -> recipe.Rope:
    """Return the rotary positions."""
    rope = config.rope_parameters or config.rope_scaling or RopeParameters()
    if rope.rope_type != "llama3":
        return recipe.Rope(base=plain_base(rope, config.rope_theta))
    if missing := [key for key in LLAMA3_ROPE if getattr(rope, key) is None]:
        raise CheckpointError(
            f"its rotary positions are scaled by llama3, without {', '.join(missing)}. "
            "Correct the file, or use another model."
        )
    scaling = {option: getattr(rope, key) for key, option in LLAMA3_ROPE.items()}
    return recipe.Rope(base=rope.rope_theta or config.rope_theta, scaling=recipe.RopeScaling.model_validate(scaling))


def neighbours_to_halves(name: str, weight: Tensor, config: LlamaConfig) -> Tensor:
    """Reorder a projection of queries or keys from rotating neighbouring numbers to rotating the halves of a head.
    Return other weights unchanged."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.key_value_heads}.get(name.split(".")[-2])
    if heads is None:
        return weight
    return weight.unflatten(0, (heads, -1, 2)).transpose(1, 2).reshape(weight.shape)


def halves_to_neighbours(weight: Tensor, heads: int | None) -> Tensor:
    """Return a projection of queries or keys in the other order; without `heads`, the weight unchanged."""
    return weight if heads is None else weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(weight.shape)
