"""Llama (Touvron et al. 2023) as a model of lmlong: its configuration, its options, and the mapping of its weights."""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, NamedTuple

import torch
from pydantic import AliasChoices, Field, ValidationError
from torch import Tensor

from lmlong import recipe
from lmlong.errors import CheckpointError, RecipeError
from lmlong.io.checked import Checked, checked, shown
from lmlong.recipe import bounds

ARCHITECTURE = "LlamaForCausalLM"

Size = Annotated[int, Field(gt=0, le=bounds.WIDTH)]
Length = Annotated[int, Field(gt=0, le=bounds.TOKENS)]
Base = Annotated[float, Field(gt=1, le=1e12)]
Factor = Annotated[float, Field(gt=0, le=1e6)]


class RopeParameters(Checked):
    """Rotary positions: `rope_parameters` since transformers 5, `rope_scaling` before."""

    rope_type: str = Field("default", validation_alias=AliasChoices("rope_type", "type"))
    rope_theta: Base | None = None
    factor: Factor | None = None
    low_freq_factor: Factor | None = None
    high_freq_factor: Factor | None = None
    original_max_position_embeddings: Length | None = None


LLAMA3_ROPE = {
    "factor": "factor",
    "low_freq_factor": "low_frequency_factor",
    "high_freq_factor": "high_frequency_factor",
    "original_max_position_embeddings": "original_length",
}
"""The parameters of rope type llama3, and the equal options of lmlong's recipe.RopeScaling."""


class Architecture(Checked):
    """The kind of a model in its config.json."""

    architectures: list[str] = Field(default_factory=list)
    model_type: str = ""


class LlamaConfig(Checked):
    """The values of a Llama's config.json."""

    hidden_size: Size
    intermediate_size: Size
    num_hidden_layers: Annotated[int, Field(gt=0, le=10_000)]
    num_attention_heads: Size
    num_key_value_heads: Size | None = None
    head_dim: Size | None = None
    vocab_size: Annotated[int, Field(gt=0, le=bounds.VOCABULARY)] | None = None
    max_position_embeddings: Annotated[int, Field(ge=8, le=bounds.TOKENS)] = 2048
    hidden_act: str = "silu"
    attention_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    rms_norm_eps: Annotated[float, Field(gt=0, le=1)] = 1e-6
    rope_theta: Base = 10_000.0
    rope_parameters: RopeParameters | None = None
    rope_scaling: RopeParameters | None = None

    @property
    def key_value_heads(self) -> int:
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def rope(self) -> RopeParameters:
        return self.rope_parameters or self.rope_scaling or RopeParameters()


def read_config(file: object, values: Mapping[str, Any], keys: Mapping[str, str] | None = None) -> LlamaConfig:
    """Return the configuration of a file. `keys` maps names of `LlamaConfig` to the file's names that differ."""
    return checked(LlamaConfig, file, _without_null(values), keys)


def _without_null(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values without nulls and empty rope parameters, which count as missing."""
    set_values = {}
    for key, value in values.items():
        if key in ("rope_parameters", "rope_scaling") and isinstance(value, dict):
            value = _without_null(value) or None
        if value is not None:
            set_values[key] = value
    return set_values


class LlamaSource(NamedTuple):
    """A pretrained model in a file or folder."""

    name: str  # for messages
    config: LlamaConfig
    shapes: Mapping[str, tuple[int, ...]]  # of its weights, by transformers' names
    dtype: torch.dtype  # can hold every weight exactly
    read: Callable[[str], Tensor]
    tokenizer: Callable[[], bytes]  # the file of a tokenizer


def model_options(source: LlamaSource) -> recipe.Model:
    """Return the options of the same model. Raise CheckpointError if lmlong does not support a part of it."""
    config = source.config
    for key in ("attention_bias", "mlp_bias"):
        if getattr(config, key):
            raise CheckpointError(f"{source.name}: {key} is set; biases are not supported. Use a model without.")
    if config.hidden_act != "silu":
        raise CheckpointError(
            f"{source.name}: its MLP is gated by {shown(config.hidden_act)}; only silu is supported. Use another model."
        )
    try:
        return recipe.Model(
            width=config.hidden_size,
            layers=config.num_hidden_layers,
            heads=config.num_attention_heads,
            kv_heads=config.key_value_heads,
            head_dim=config.head_dim or config.hidden_size // config.num_attention_heads,
            attention=recipe.Attention(kind="softmax"),
            convolution=0,
            positions="rotary",
            rope=_rope(source),
            output_gate=False,
            head_norm=False,
            norm_epsilon=config.rms_norm_eps,
            embedding_scale=1.0,
            tied_output=config.tie_word_embeddings,
            mlp_width=config.intermediate_size,
        )
    except (RecipeError, ValidationError) as error:
        raise CheckpointError(f"{source.name}: invalid sizes ({error}) Use another model.") from None


def _rope(source: LlamaSource) -> recipe.Rope:
    """Return the rotary positions."""
    rope = source.config.rope
    base = rope.rope_theta or source.config.rope_theta
    if rope.rope_type == "default":
        return recipe.Rope(base=base)
    if rope.rope_type != "llama3":
        raise CheckpointError(
            f"{source.name}: its rotary positions are scaled by {shown(rope.rope_type)}, not llama3 or default. "
            "Use another model."
        )
    if missing := [key for key in LLAMA3_ROPE if getattr(rope, key) is None]:
        raise CheckpointError(
            f"{source.name}: its rotary positions are scaled by llama3, without {', '.join(missing)}. "
            "Correct the file, or use another model."
        )
    scaling = {option: getattr(rope, key) for key, option in LLAMA3_ROPE.items()}
    return recipe.Rope(base=base, scaling=recipe.RopeScaling.model_validate(scaling))


OUTER_WEIGHTS = {"embedding": "model.embed_tokens", "norm": "model.norm", "lm_head.output": "lm_head"}
LAYER_WEIGHTS = {
    "mixer.norm": ["input_layernorm"],
    "mixer.in_proj": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    "mixer.out_proj": ["self_attn.o_proj"],
    "mlp.norm": ["post_attention_layernorm"],
    "mlp.in_proj": ["mlp.gate_proj", "mlp.up_proj"],
    "mlp.out_proj": ["mlp.down_proj"],
}
"""lmlong's weights, and the weights of transformers' Llama that are stacked in each."""


def llama_names(name: str) -> list[str]:
    """Return the names of Llama's weights that are stacked in a weight of lmlong."""
    module = name.removesuffix(".weight")
    if module in OUTER_WEIGHTS:
        return [f"{OUTER_WEIGHTS[module]}.weight"]
    _, layer, part = module.split(".", 2)
    return [f"model.layers.{layer}.{llama_part}.weight" for llama_part in LAYER_WEIGHTS[part]]


def vocabulary_of(shapes: Mapping[str, tuple[int, ...]]) -> int | None:
    """Return the number of rows of the embedding."""
    return next(iter(shapes.get("model.embed_tokens.weight", ())), None)


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


def check_layers(source: LlamaSource) -> None:
    """Raise CheckpointError if the number of layers differs from the configuration, before a model is built."""
    numbers = {name.split(".")[2] for name in source.shapes if re.match(r"model\.layers\.\d+\.", name)}
    if len(numbers) != source.config.num_hidden_layers:
        raise CheckpointError(
            f"{source.name}: num_hidden_layers is {source.config.num_hidden_layers:,}, but there are weights of "
            f"{len(numbers):,} layers. Use a complete model."
        )


def check_weights(source: LlamaSource, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise CheckpointError, which lists all mistakes, unless the weights have these `shapes`."""
    mistakes = list(_mistakes(source, shapes))
    if mistakes:
        listed = "".join(f"\n  {mistake}" for mistake in mistakes[:20])
        more = f"\n  and {len(mistakes) - 20} more" if len(mistakes) > 20 else ""
        raise CheckpointError(f"{source.name}: the weights do not match the configuration:{listed}{more}")


def _mistakes(source: LlamaSource, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[str]:
    expected = set()
    for name, shape in shapes.items():
        parts = llama_names(name)
        expected.update(parts)
        if missing := [part for part in parts if part not in source.shapes]:
            yield from (f"{part}: missing" for part in missing)
            continue
        sizes = [source.shapes[part] for part in parts]
        stacked = (sum(size[0] for size in sizes), *sizes[0][1:]) if all(sizes) else ()
        if stacked != shape or len({size[1:] for size in sizes}) > 1:
            yield f"{' + '.join(parts)}: {' + '.join(map(str, sizes))}, not {shape}"
    yield from (f"{name}: unknown weight" for name in source.shapes if name not in expected)
