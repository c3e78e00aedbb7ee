"""What a recipe becomes before the first step: tokens, a model, and a number of steps."""

from pathlib import Path
from typing import NamedTuple

import torch

from lmlong.checkpoint import read
from lmlong.model.device import pick_device
from lmlong.model.language_model import LanguageModel
from lmlong.recipe import Recipe
from lmlong.text import tokenizer as tokenizers
from lmlong.text.batches import TrainingBatches
from lmlong.text.ring import Ring
from lmlong.text.rows import Documents, Rows, Streams, Windows
from lmlong.text.tokens import Tokens, prepare
from lmlong.training.optimizer import count_steps
from lmlong.training.precision import resolve


class Setup(NamedTuple):
    """All that training needs."""

    recipe: Recipe  # with what was left to the machine filled in
    tokens: Tokens
    model: LanguageModel
    device: torch.device

    @property
    def tokens_per_step(self) -> int:
        return self.recipe.sequences_per_step * self.recipe.text.sequence_length

    @property
    def steps(self) -> int:
        return count_steps(self.recipe.training, self.tokens_per_step)

    def batches(self) -> TrainingBatches:
        """The batches of the run, all of them, in order."""
        training = self.recipe.training
        sources = [self._rows(number) for number in range(len(self.tokens.train))]
        eos = self.tokens.tokenizer.eos
        return TrainingBatches(sources, self.tokens.weights, eos, training.batch_size, training.carry_state)

    def _rows(self, source: int) -> Rows:
        """How a source of the text is cut into rows."""
        file, tokenizer = self.tokens.train[source], self.tokens.tokenizer
        ring = Ring(file.tokens, file.starts, tokenizer.bos, tokenizer.eos, self.recipe.model.factor)
        length, key = self.recipe.text.sequence_length, (self.recipe.seed, source)
        if self.recipe.text.rows == "documents":
            return Documents(ring, length, key, self.recipe.sequences_per_step)
        return (Streams if self.recipe.training.carry_state else Windows)(ring, length, key)


def set_up(recipe: Recipe, start: Path | None = None, new_attention: bool = False) -> Setup:
    """Read the text and build the model; a checkpoint to start from lends its tokenizer and weights.

    With `new_attention` the checkpoint's attention may be another one than the recipe's; all else must fit.
    """
    device = pick_device(recipe.device)
    training = recipe.training.model_copy(update={"precision": resolve(recipe.training.precision, device)})
    recipe = recipe.model_copy(update={"training": training, "device": device.type})
    tokens = prepare(recipe.text, tokenizers.load(read.tokenizer_path(start)) if start else None)

    torch.manual_seed(recipe.seed)
    model = LanguageModel(recipe.model, tokens.tokenizer.vocabulary, training.activation_checkpointing)
    if start:
        read.load_weights(model, start, new_attention)
    if training.compile:
        model.go_on = torch.compile(model.go_on)  # type: ignore[method-assign]
    return Setup(recipe, tokens, model, device)
