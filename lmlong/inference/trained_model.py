"""A trained model with all that belongs to it."""

import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from lmlong.data.tokenizers.base import Tokenizer
from lmlong.model.base import TextModel, count_parameters
from lmlong.model.device import Precision, evaluation_precision
from lmlong.model.kernel_check import checked_kernels
from lmlong.model.language_model import LanguageModel
from lmlong.recipe import Recipe


@dataclass(frozen=True, repr=False)
class TrainedModel:
    """A trained model of any objective, with its recipe and tokenizer."""

    model: TextModel
    tokenizer: Tokenizer
    recipe: Recipe
    checkpoint: Path
    step: int | None = None
    """Optimizer steps taken."""
    trained_tokens: int | None = None
    """Tokens trained on, including those of earlier runs by training.init_from."""
    weights_hash: str = ""
    """The sha256 of the weights file."""

    def __repr__(self) -> str:
        kinds = " + ".join(dict.fromkeys(self.recipe.model.mixer_kinds))
        size, tokens = f"{count_parameters(self.model):,} parameters", f"{self.trained_tokens or 0:,} tokens"
        return f"<{type(self).__name__} {self.checkpoint}: {size}, {kinds} attention, trained on {tokens}>"

    @property
    def device(self) -> torch.device:
        return self.model.embedding.weight.device

    def set_up_evaluation(self, precision: Precision | None) -> Precision:
        """Return the number format to evaluate in, by default that of training, and check the kernels in it."""
        chosen = evaluation_precision(precision, self.recipe.training.precision, self.device)
        self.check_kernels(chosen)
        return chosen

    def check_kernels(self, precision: Precision) -> None:
        """Use the kernels of the device for reading in a number format. On a GPU they are first compared with torch;
        one that differs is not used, which is reported on stderr. After `model.use_kernel` nothing changes. An encoder
        has none."""
        if not isinstance(self.model, LanguageModel):
            return
        names, refused = checked_kernels(self.model, precision, False, self.device)
        self.model.use_kernels(names)
        for line in refused:
            print(line, file=sys.stderr)
