"""Build the model of a recipe, by its objective."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from lmlong.model.base import TextModel
from lmlong.model.encoder import Encoder
from lmlong.model.language_model import LanguageModel
from lmlong.recipe import Recipe


def build(recipe: Recipe, vocabulary: int) -> TextModel:
    """Return a new model for a vocabulary of this size."""
    again = recipe.training.activation_checkpointing
    if recipe.objective == "masked":
        return Encoder(recipe.model, vocabulary, recipe.text.sequence_length, again)
    return LanguageModel(recipe.model, vocabulary, again)


@contextmanager
def without_memory() -> Iterator[None]:
    """Build models on the meta device: their weights have shapes but no memory."""
    with torch.device("meta"), _Undrawn():
        yield


class _Undrawn(TorchFunctionMode):
    """A mode that skips weight initialization: on the meta device torch would load its compiler for it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__module__", None) == "torch.nn.init":
            return args[0] if args else kwargs["tensor"]
        return func(*args, **(kwargs or {}))
