"""Building the model of a recipe, by its objective."""

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
