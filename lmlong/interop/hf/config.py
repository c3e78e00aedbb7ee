"""transformers' configuration of an exported model, and the names of its weights."""

from typing import Any

from torch import Tensor

from lmlong import recipe
from lmlong.interop.architecture import Architecture, first_name

MODULE, CONFIG, MODEL = "modeling_lmlong", "LmlongConfig", "LmlongForCausalLM"


def lmlong_config(model: recipe.Model, vocabulary: int) -> dict[str, Any]:
    """Return the configuration of a model of lmlong, for the module that is exported with it."""
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


def weights_of(weights: dict[str, Tensor], architecture: Architecture[Any], model: recipe.Model) -> dict[str, Tensor]:
    """Return the weights split and named as in an architecture of transformers."""
    named = {}
    for name, weight in weights.items():
        part = architecture.part(name, model)
        for own, piece in zip(part.names, part.split(weight), strict=True):
            named[first_name(own)] = piece.contiguous()
    return named
