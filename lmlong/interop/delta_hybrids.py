"""Models of the gated delta rule (Yang et al. 2025) and softmax: Qwen3.5 and OLMo-Hybrid."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from lmlong import recipe
from lmlong.interop.architecture import (
    QKV,
    Architecture,
    Config,
    Part,
    Size,
    layer_kinds,
    mlp_parts,
    only_used,
    pattern,
    plain_base,
    rows,
    softmax_heights,
    softmax_parts,
    softmax_values,
    taps,
)

DELTA_OF = {"linear_attention": "delta", "full_attention": "softmax"}
DELTA_GATES = {"A_log": "forget_gate.log_rate", "dt_bias": "forget_gate.bias"}


class DeltaConfig(Config):
    """The values of the layers with the gated delta rule."""

    linear_conv_kernel_dim: Annotated[int, Field(gt=0, le=64)] = 4
    linear_key_head_dim: Size | None = None
    linear_value_head_dim: Size | None = None
    linear_num_key_heads: Size | None = None
    linear_num_value_heads: Size | None = None


def delta_options(config: DeltaConfig, keys: int, values: int, key_dim: int, value_dim: int) -> dict[str, Any]:
    """Return the options of a model whose layers are of the gated delta rule, unless `mixers` says otherwise. The
    queries of transformers are divided by the root of their size, which a norm of the output makes up for if its
    epsilon is multiplied by the size."""
    return {
        "width": config.hidden_size,
        "layers": config.num_hidden_layers,
        "heads": values,
        "key_heads": keys if keys != values else None,
        "head_dim": key_dim,
        "value_dim": value_dim,
        "convolution": config.linear_conv_kernel_dim,
        "convolution_activation": "silu",
        "positions": "none",
        "output_gate": True,
        "head_norm": "shared",
        "norm_epsilon": config.rms_norm_eps,
        "embedding_scale": 1.0,
        "tied_output": config.tie_word_embeddings,
        "mlp_width": config.intermediate_size,
    }


def delta_values(model: recipe.Model) -> dict[str, Any]:
    """Return these options as values of config.json."""
    own = model.of_kind("delta")
    names = {kind: name for name, kind in DELTA_OF.items()}
    return {
        "layer_types": [names[kind] for kind in model.kinds],
        "linear_conv_kernel_dim": own.convolution,
        "linear_key_head_dim": own.head_dims.key,
        "linear_value_head_dim": own.head_dims.value,
        "linear_num_key_heads": own.key_heads or own.heads,
        "linear_num_value_heads": own.heads,
        "hidden_act": "silu",
        "attention_bias": False,
    }


class QwenConfig(DeltaConfig):
    """The values of the text part of a Qwen3.5's config.json."""

    head_dim: Size = 256
    linear_key_head_dim: Size = 128
    linear_value_head_dim: Size = 128
    linear_num_key_heads: Size = 16
    linear_num_value_heads: Size = 32
    full_attention_interval: Annotated[int, Field(gt=0, le=10_000)] = 4
    partial_rotary_factor: Annotated[float, Field(gt=0, le=1)] = 0.25


class Qwen(Architecture[QwenConfig]):
    name = "Qwen3_5ForCausalLM"
    loads = ("Qwen3_5ForConditionalGeneration",)
    config = QwenConfig
    left_out: ClassVar = {r"model\.visual\.": "of vision", r"mtp\.": "that predict several tokens"}
    renamed = ("model.language_model.", "model.")

    def options(self, config: QwenConfig) -> dict[str, Any]:
        every = config.full_attention_interval
        usual = [
            "linear_attention" if (layer + 1) % every else "full_attention" for layer in range(config.num_hidden_layers)
        ]
        kinds, rope = layer_kinds(config, DELTA_OF, usual), config.rope_parameters
        share = (rope.partial_rotary_factor if rope else None) or config.partial_rotary_factor
        softmax = recipe.Mixer(
            kind="softmax",
            heads=config.num_attention_heads,
            kv_heads=config.key_value_heads,
            head_dim=config.head_dim,
            value_dim=config.head_dim,
            convolution=0,
            positions="rotary",
            rope=recipe.Rope(base=plain_base(rope, 10_000.0), share=share),
            query_key_norm="head",
            output_gate="sigmoid",
            head_norm=False,
        )
        heads = config.linear_num_key_heads, config.linear_num_value_heads
        sizes = config.linear_key_head_dim, config.linear_value_head_dim
        return {
            **delta_options(config, *heads, *sizes),
            "attention": recipe.Attention(
                kind=pattern(kinds),
                decay="softplus",
                delta=recipe.Delta(feature_map="identity", beta_bias=False),
            ),
            "mixers": only_used([softmax], kinds),
            "head_norm_epsilon": config.rms_norm_eps * config.linear_key_head_dim,
            "centered_gains": True,
        }

    def layer(self, model: recipe.Model, kind: str) -> Mapping[str, Part]:
        own = model.of_kind(kind)
        if kind == "delta":
            return {**_qwen_delta(own), **mlp_parts(own, "post_attention_layernorm.weight")}
        queries, keys, _ = softmax_heights(own)
        heads = own.heads

        def join(parts: list[Tensor]) -> Tensor:
            q, gate = parts[0].unflatten(0, (heads, 2, -1)).unbind(1)
            return torch.cat([q.flatten(0, 1), *parts[1:], gate.flatten(0, 1)])

        def split(weight: Tensor) -> list[Tensor]:
            q, k, v, gate = weight.split([queries, keys, keys, queries])
            both = torch.stack([part.unflatten(0, (heads, -1)) for part in (q, gate)], dim=1)
            return [both.flatten(0, 2), k, v]

        return {
            "mixer.norm.weight": Part(["input_layernorm.weight"]),
            **softmax_parts(own, Part(QKV, join, split)),
            **mlp_parts(own, "post_attention_layernorm.weight"),
        }

    def may_be(self, model: recipe.Model) -> bool:
        return {"delta"} <= set(model.kinds) <= {"delta", "softmax"}

    def values(self, model: recipe.Model) -> dict[str, Any]:
        own = model.of_kind("softmax")
        rope = {"rope_type": "default", "rope_theta": own.rope.base, "partial_rotary_factor": own.rope.share}
        return {
            "model_type": "qwen3_5_text",
            **softmax_values(model),
            "head_dim": own.head_dims.key,
            **delta_values(model),
            "rope_parameters": rope,
        }


def _qwen_delta(own: recipe.Model) -> dict[str, Part]:
    channels, values = _delta_channels(own)
    return {
        "mixer.norm.weight": Part(["input_layernorm.weight"]),
        "mixer.in_proj.weight": rows(
            [sum(channels), values], "linear_attn.in_proj_qkv.weight", "linear_attn.in_proj_z.weight"
        ),
        "mixer.convolution.weight": taps([sum(channels)], "linear_attn.conv1d.weight"),
        "mixer.forget_gate.weight": Part(["linear_attn.in_proj_a.weight"]),
        "mixer.beta.weight": Part(["linear_attn.in_proj_b.weight"]),
        **{f"mixer.{ours}": Part([f"linear_attn.{theirs}"]) for theirs, ours in DELTA_GATES.items()},
        "mixer.head_norm.weight": Part(["linear_attn.norm.weight"]),
        "mixer.out_proj.weight": Part(["linear_attn.out_proj.weight"]),
    }


def _delta_channels(own: recipe.Model) -> tuple[list[int], int]:
    """Return the numbers of channels of queries, keys and values, and that of values."""
    keys, values = (own.key_heads or own.heads) * own.head_dims.key, own.heads * own.head_dims.value
    return [keys, keys, values], values


class OlmoConfig(DeltaConfig):
    """The values of an OLMo-Hybrid's config.json."""

    linear_allow_neg_eigval: bool = True

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Heads of keys and of values, and their sizes."""
        keys = self.linear_num_key_heads or self.num_attention_heads
        key_dim = self.linear_key_head_dim or int(0.75 * self.hidden_size / keys)
        values = self.linear_num_value_heads or self.num_attention_heads
        return keys, values, key_dim, self.linear_value_head_dim or 2 * key_dim


class Olmo(Architecture[OlmoConfig]):
    name = "OlmoHybridForCausalLM"
    config = OlmoConfig
    epsilon = 1e-5
    """Of the norm of a head's output."""

    def options(self, config: OlmoConfig) -> dict[str, Any]:
        count = config.num_hidden_layers
        usual = ["full_attention" if layer % 4 == 3 else "linear_attention" for layer in range(count)]
        if "full_attention" not in usual:
            usual[-1] = "full_attention"
        kinds, rope = layer_kinds(config, DELTA_OF, usual), config.rope_parameters
        base = plain_base(rope, 0.0)
        softmax = recipe.Mixer(
            kind="softmax",
            heads=config.num_attention_heads,
            kv_heads=config.key_value_heads,
            head_dim=config.default_head_dim,
            value_dim=config.default_head_dim,
            convolution=0,
            positions="rotary" if base else "none",
            rope=recipe.Rope(base=base) if base else None,
            query_key_norm="all",
            output_gate=False,
            head_norm=False,
            norm="after",
        )
        max_beta: Literal[1, 2] = 2 if config.linear_allow_neg_eigval else 1
        delta = recipe.Delta(feature_map="identity", max_beta=max_beta, beta_bias=False)
        return {
            **delta_options(config, *config.sizes),
            "attention": recipe.Attention(kind=pattern(kinds), decay="softplus", delta=delta),
            "mixers": only_used([softmax], kinds),
            "head_norm_epsilon": self.epsilon * config.sizes[2],
        }

    def layer(self, model: recipe.Model, kind: str) -> Mapping[str, Part]:
        own = model.of_kind(kind)
        if kind == "delta":
            channels, values = _delta_channels(own)
            convolutions = [f"linear_attn.{name}_conv1d.weight" for name in "qkv"]
            projections = [f"linear_attn.{name}_proj.weight" for name in "qkvg"]
            return {
                "mixer.norm.weight": Part(["attention_layer_norm.weight|input_layernorm.weight"]),
                "mixer.in_proj.weight": rows([*channels, values], *projections),
                "mixer.convolution.weight": taps(channels, *convolutions),
                "mixer.forget_gate.weight": Part(["linear_attn.a_proj.weight"]),
                "mixer.beta.weight": Part(["linear_attn.b_proj.weight"]),
                **{f"mixer.{ours}": Part([f"linear_attn.{theirs}"]) for theirs, ours in DELTA_GATES.items()},
                "mixer.head_norm.weight": Part(["linear_attn.o_norm.weight"]),
                "mixer.out_proj.weight": Part(["linear_attn.o_proj.weight"]),
                **mlp_parts(own, "feedforward_layer_norm.weight|post_attention_layernorm.weight"),
            }
        return {
            "mixer.norm.weight": Part(["post_attention_layernorm.weight|feedforward_layer_norm.weight"]),
            **softmax_parts(own),
            **mlp_parts(own, "post_feedforward_layernorm.weight"),
        }

    def may_be(self, model: recipe.Model) -> bool:
        return set(model.kinds) == {"delta", "softmax"}

    def values(self, model: recipe.Model) -> dict[str, Any]:
        own = model.of_kind("softmax")
        rope = {"rope_type": "default", "rope_theta": own.rope.base} if own.uses_rope("softmax") else None
        return {
            "model_type": "olmo_hybrid",
            **softmax_values(model),
            **delta_values(model),
            "linear_allow_neg_eigval": model.attention.delta.max_beta == 2,
            "rope_parameters": rope,
        }
