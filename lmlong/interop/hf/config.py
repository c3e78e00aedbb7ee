"""transformers' configuration of an exported model, and the names of its weights."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lmlong import recipe
from lmlong.interop.llama import ARCHITECTURE, LLAMA3_ROPE, llama_names

MODULE, CONFIG, MODEL = "modeling_lmlong", "LmlongConfig", "LmlongForCausalLM"


def is_llama(model: recipe.Model) -> bool:
    """Return whether transformers' own Llama can load the model."""
    added = model.downsample or model.ngram_embedding or model.add_ngram or model.mixers
    plain = not (model.convolution or model.output_gate or model.head_norm or added)
    keys, values = model.head_dims
    return (
        plain
        and set(model.kinds) == {"softmax"}
        and model.positions in ("auto", "rotary")
        and keys == values
        and model.embedding_scale == 1.0
    )


def llama_config(chosen: recipe.Recipe, vocabulary: int) -> dict[str, Any]:
    """Return the configuration of a Llama."""
    model, scaling = chosen.model, chosen.model.rope.scaling
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": model.rope.base}
    if scaling:
        rope |= {"rope_type": "llama3", **{key: getattr(scaling, option) for key, option in LLAMA3_ROPE.items()}}
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "vocab_size": vocabulary,
        "hidden_size": model.width,
        "intermediate_size": model.inner_width,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads or model.heads,
        "head_dim": model.head_dims.key,
        "rms_norm_eps": model.norm_epsilon,
        "tie_word_embeddings": model.tied_output,
        "use_cache": True,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "max_position_embeddings": chosen.text.sequence_length,
        "rope_parameters": rope,
        "rope_theta": model.rope.base,
    }


def lmlong_config(model: recipe.Model, vocabulary: int) -> dict[str, Any]:
    """Return the configuration of any other model, for the module that is exported with it."""
    return {
        "architectures": [MODEL],
        "auto_map": {"AutoConfig": f"{MODULE}.{CONFIG}", "AutoModelForCausalLM": f"{MODULE}.{MODEL}"},
        "model_type": "lmlong",
        "model": model.model_dump(mode="json"),
        "vocab_size": vocabulary,
        "tie_word_embeddings": model.tied_output,
        "use_cache": True,
    }


def lmlong_weights(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights under their names in the exported module."""
    return {f"model.{name}": weight for name, weight in weights.items()}


def llama_weights(weights: dict[str, Tensor], model: recipe.Model) -> dict[str, Tensor]:
    """Return the weights split and named as in transformers' Llama."""
    return dict(part for name, weight in weights.items() for part in _parts(name, weight, model))


def _parts(name: str, weight: Tensor, model: recipe.Model) -> Iterator[tuple[str, Tensor]]:
    names = llama_names(name)
    heads = [model.heads, *[model.kv_heads or model.heads] * 2]
    sizes = [weight.shape[0] // len(names)] * len(names)
    if len(names) == len(heads):
        sizes = [count * model.head_dims.key for count in heads]
    yield from zip(names, (part.contiguous() for part in torch.split(weight, sizes)), strict=True)
