"""LFM2, a model of short convolutions and softmax."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field

from lmlong import recipe
from lmlong.interop.architecture import (
    Architecture,
    Base,
    Config,
    Epsilon,
    Part,
    Size,
    layer_kinds,
    mlp_parts,
    only_used,
    pattern,
    plain_base,
    softmax_parts,
    softmax_values,
    taps,
)


class LfmConfig(Config):
    """The values of an LFM2's config.json."""

    num_key_value_heads: Size | None = 8
    norm_eps: Epsilon = 1e-5
    conv_bias: bool = False
    conv_L_cache: Annotated[int, Field(gt=0, le=64)] = 3
    block_multiple_of: Size = 256
    block_ffn_dim_multiplier: Annotated[float | int | None, Field(gt=0, le=1e6)] = 1.0
    block_auto_adjust_ff_dim: bool = True
    block_ff_dim: Size | None = None
    full_attn_idxs: list[int] | None = None
    tie_word_embeddings: bool = True
    tie_embedding: bool | None = None
    rope_theta: Base = 1_000_000.0

    @property
    def inner_width(self) -> int:
        """The inner width of the MLP."""
        inner = self.block_ff_dim or self.intermediate_size
        if self.block_auto_adjust_ff_dim:
            inner = int(2 * inner / 3)
            if self.block_ffn_dim_multiplier is not None:
                inner = int(self.block_ffn_dim_multiplier * inner)
                inner = -(-inner // self.block_multiple_of) * self.block_multiple_of
        return inner


class Lfm(Architecture[LfmConfig]):
    name = "Lfm2ForCausalLM"
    config = LfmConfig
    outer: ClassVar = {**Architecture.outer, "norm.weight": "model.embedding_norm.weight"}
    kinds: ClassVar = {"conv": "convolution", "full_attention": "softmax"}

    def options(self, config: LfmConfig) -> dict[str, Any]:
        count, chosen = config.num_hidden_layers, config.full_attn_idxs
        with_attention = range(count) if chosen is None else chosen
        usual = ["full_attention" if layer in with_attention else "conv" for layer in range(count)]
        kinds = layer_kinds(config, self.kinds, usual)
        convolution = recipe.Mixer(
            kind="convolution", convolution=config.conv_L_cache, input_gate=True, output_gate="identity"
        )
        return {
            "width": config.hidden_size,
            "layers": count,
            "heads": config.num_attention_heads,
            "kv_heads": config.key_value_heads,
            "head_dim": config.default_head_dim,
            "attention": recipe.Attention(kind=pattern(kinds)),
            "mixers": only_used([convolution], kinds),
            "convolution": 0,
            "positions": "rotary",
            "rope": recipe.Rope(base=plain_base(config.rope_parameters, config.rope_theta)),
            "query_key_norm": "head",
            "output_gate": False,
            "head_norm": False,
            "norm_epsilon": config.norm_eps,
            "embedding_scale": 1.0,
            "tied_output": self.tied(config),
            "mlp_width": config.inner_width,
        }

    def tied(self, config: LfmConfig) -> bool:
        return config.tie_word_embeddings if config.tie_embedding is None else config.tie_embedding

    def layer(self, model: recipe.Model, kind: str) -> Mapping[str, Part]:
        own, mlp = model.of_kind(kind), [f"feed_forward.{name}.weight" for name in ("w1", "w3", "w2")]
        common = {
            "mixer.norm.weight": Part(["operator_norm.weight"]),
            **mlp_parts(own, "ffn_norm.weight", mlp),
        }
        if kind == "convolution":  # transformers has the gate before, that after, and the values
            return {
                **common,
                "mixer.in_proj.weight": Part(
                    ["conv.in_proj.weight"],
                    lambda parts: parts[0].unflatten(0, (3, -1)).roll(1, 0).flatten(0, 1),
                    lambda weight: [weight.unflatten(0, (3, -1)).roll(-1, 0).flatten(0, 1)],
                ),
                "mixer.convolution.weight": taps([own.width], "conv.conv.weight"),
                "mixer.out_proj.weight": Part(["conv.out_proj.weight"]),
            }
        return {**common, **softmax_parts(own, norms="layernorm", out="out_proj")}

    def may_be(self, model: recipe.Model) -> bool:
        return {"convolution"} <= set(model.kinds) <= {"convolution", "softmax"}

    def values(self, model: recipe.Model) -> dict[str, Any]:
        own, names = model.of_kind("softmax"), {kind: name for name, kind in self.kinds.items()}
        return {
            "model_type": "lfm2",
            **softmax_values(model),
            "layer_types": [names[kind] for kind in model.kinds],
            "norm_eps": model.norm_epsilon,
            "conv_L_cache": model.of_kind("convolution").convolution,
            "conv_bias": False,
            "block_auto_adjust_ff_dim": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": own.rope.base},
        }
