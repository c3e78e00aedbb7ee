"""What a recipe becomes before the first step: tokens, a model, and a number of steps."""

from pathlib import Path
from typing import NamedTuple

import torch

from lmlong.attention import chunked, kernels
from lmlong.checkpoint import read
from lmlong.errors import UsageError
from lmlong.model.build import build
from lmlong.model.device import pick_device
from lmlong.model.language_model import LanguageModel
from lmlong.model.text_model import TextModel
from lmlong.recipe import Recipe
from lmlong.text.material import MATERIAL, Material
from lmlong.text.tokens import Tokens, prepare
from lmlong.training.optimizer import count_steps
from lmlong.training.precision import resolve


class Setup(NamedTuple):
    """All that training needs."""

    recipe: Recipe  # with what was left to the machine filled in
    tokens: Tokens
    model: TextModel
    device: torch.device

    @property
    def tokens_per_step(self) -> int:
        return self.recipe.sequences_per_step * self.recipe.text.sequence_length

    @property
    def steps(self) -> int:
        return count_steps(self.recipe.training, self.tokens_per_step)

    @property
    def material(self) -> Material:
        """The text as the model reads it."""
        return MATERIAL[self.recipe.objective](self.recipe, self.tokens)


def set_up(recipe: Recipe, start: Path | None = None, new_attention: bool = False) -> Setup:
    """Read the text and build the model; a checkpoint to start from lends its tokenizer and weights.

    With `new_attention` the checkpoint's attention may be another one than the recipe's; all else must fit.
    """
    device = pick_device(recipe.device)
    if recipe.training.kernel == "triton" and (why := kernels.obstacle(device)):
        raise UsageError(f"training.kernel: triton cannot be used here: {why}. Use torch or auto.")
    training = recipe.training.model_copy(update={"precision": resolve(recipe.training.precision, device)})
    recipe = recipe.model_copy(update={"training": training, "device": device.type})
    tokens = prepare(recipe.text, read.read_tokenizer(start) if start else None)

    torch.manual_seed(recipe.seed)
    model = build(recipe, tokens.tokenizer.vocabulary)
    if start:
        read.load_weights(model, start, new_attention)
    if training.kernel != "auto" and isinstance(model, LanguageModel):
        model.scan_by(kernels.load() if training.kernel == "triton" else chunked.attend)
    if training.compile:
        model.fuse()
    return Setup(recipe, tokens, model, device)
