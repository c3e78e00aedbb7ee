"""Llama (Touvron et al. 2023) as a model of lmlong: the options that make its blocks, and where its weights go."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from pydantic import ValidationError
from torch import Tensor

from lmlong import recipe
from lmlong.errors import RecipeError, UsageError

ARCHITECTURE = "LlamaForCausalLM"


class Source(NamedTuple):
    """A model in a file of others."""

    name: str  # for messages
    config: Mapping[str, Any]  # by the names of transformers
    shapes: Mapping[str, tuple[int, ...]]  # of its weights, by the names of transformers
    dtype: torch.dtype  # that keeps all that the weights say
    read: Callable[[str], Tensor]
    tokenizer: Callable[[], bytes]  # the file of a tokenizer


def model_options(source: Source) -> recipe.Model:
    """Return the options of the same model; refuse what it cannot be."""
    config = source.config
    for key in ("attention_bias", "mlp_bias"):
        if config.get(key):
            raise UsageError(f"{source.name}: {key} is set, and no layer here has a bias. Use a model without.")
    if (activation := config.get("hidden_act", "silu")) != "silu":
        raise UsageError(f"{source.name}: its MLP is gated by {activation}, and here by silu. Use another model.")
    try:
        width, heads = config["hidden_size"], config["num_attention_heads"]
        return recipe.Model(
            width=width,
            layers=config["num_hidden_layers"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or width // heads,
            attention=recipe.Attention(kind="softmax"),
            convolution=0,
            positions="rotary",
            rope=_rope(source),
            output_gate=False,
            head_norm=False,
            norm_epsilon=config.get("rms_norm_eps", 1e-6),
            embedding_scale=1.0,
            tied_output=bool(config.get("tie_word_embeddings", False)),
            mlp_width=config["intermediate_size"],
        )
    except KeyError as error:
        raise UsageError(f"{source.name}: does not say {error.args[0]}. Use another file.") from None
    except (RecipeError, ValidationError, TypeError, ZeroDivisionError) as error:
        raise UsageError(f"{source.name}: no sizes of a Llama ({error}) Use another file.") from None


def _rope(source: Source) -> recipe.Rope:
    """Return the rotary positions, as transformers wrote them before its fifth version or since."""
    found = source.config.get("rope_parameters") or source.config.get("rope_scaling") or {}
    base = float(found.get("rope_theta") or source.config.get("rope_theta") or 10_000.0)
    kind = found.get("rope_type", found.get("type", "default"))
    if kind == "default":
        return recipe.Rope(base=base)
    if kind != "llama3":
        raise UsageError(f"{source.name}: its rotary positions are scaled by {kind!r}; llama3 and none are known.")
    scaling = recipe.RopeScaling(
        factor=float(found["factor"]),
        low_frequency_factor=float(found["low_freq_factor"]),
        high_frequency_factor=float(found["high_freq_factor"]),
        original_length=found["original_max_position_embeddings"],
    )
    return recipe.Rope(base=base, scaling=scaling)


def parts_of(name: str) -> list[str]:
    """Return the weights of a Llama that are stacked in a weight of ours."""
    whole = {
        "embedding.weight": ["model.embed_tokens.weight"],
        "norm.weight": ["model.norm.weight"],
        "lm_head.output.weight": ["lm_head.weight"],
    }
    inside = {
        "mixer.norm": ["input_layernorm"],
        "mixer.in_proj": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
        "mixer.out_proj": ["self_attn.o_proj"],
        "mlp.norm": ["post_attention_layernorm"],
        "mlp.in_proj": ["mlp.gate_proj", "mlp.up_proj"],
        "mlp.out_proj": ["mlp.down_proj"],
    }
    if name in whole:
        return whole[name]
    _, layer, part = name.removesuffix(".weight").split(".", 2)
    return [f"model.layers.{layer}.{theirs}.weight" for theirs in inside[part]]


def neighbours_to_halves(name: str, weight: Tensor, config: Mapping[str, Any]) -> Tensor:
    """Return queries or keys in the order where halves of a head are rotated, from that of neighbours; other weights as
    they are."""
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(name.split(".")[-2])
    if heads is None:
        return weight
    return weight.unflatten(0, (config[heads], -1, 2)).transpose(1, 2).reshape(weight.shape)


def check_weights(source: Source, wanted: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse a file that does not hold the weights of its model, naming all that is wrong at once."""
    mistakes = list(_mistakes(source, wanted))
    if mistakes:
        listed = "".join(f"\n  {mistake}" for mistake in mistakes[:20])
        more = f"\n  and {len(mistakes) - 20} more" if len(mistakes) > 20 else ""
        raise UsageError(f"{source.name}: not the weights that its configuration tells of:{listed}{more}")


def _mistakes(source: Source, wanted: Mapping[str, tuple[int, ...]]) -> Iterator[str]:
    known = set()
    for name, shape in wanted.items():
        parts = parts_of(name)
        known.update(parts)
        if missing := [part for part in parts if part not in source.shapes]:
            yield from (f"{part}: missing" for part in missing)
            continue
        found = [source.shapes[part] for part in parts]
        stacked = (sum(one[0] for one in found), *found[0][1:]) if all(found) else ()
        if stacked != shape or len({one[1:] for one in found}) > 1:
            yield f"{' + '.join(parts)}: {' + '.join(map(str, found))}, not {shape}"
    yield from (f"{name}: not part of such a model" for name in source.shapes if name not in known)
