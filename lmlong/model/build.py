"""The model of a recipe, by its objective."""

from lmlong.model.encoder import Encoder
from lmlong.model.language_model import LanguageModel
from lmlong.model.text_model import TextModel
from lmlong.recipe import Recipe


def build(recipe: Recipe, vocabulary: int) -> TextModel:
    """A fresh model of tokens of so large a vocabulary."""
    again = recipe.training.activation_checkpointing
    if recipe.objective == "masked":
        return Encoder(recipe.model, vocabulary, recipe.text.sequence_length, again)
    return LanguageModel(recipe.model, vocabulary, again)
