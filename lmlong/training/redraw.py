"""Random features drawn anew as training goes on, so that a model does not lean on one draw."""

from typing import Any

from lightning.pytorch import Callback, Trainer

from lmlong.attention.favor import Favor
from lmlong.model.text_model import TextModel


class Redraw(Callback):
    """Before a step, never within one: each draw is a function of the seed and the step, so a resumed run has it too.

    A training sequence is read from an empty state, so no state ever meets another draw than its own.
    """

    def __init__(self, model: TextModel, seed: int, every: int):
        self.maps = [module for module in model.modules() if isinstance(module, Favor)]
        self.seed, self.every = seed, every
        self.number = 0  # the draw in place; the model was built with draw 0

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        number = trainer.global_step // self.every
        if number == self.number:
            return
        self.number = number
        for layer, features in enumerate(self.maps):
            features.redraw(hash((self.seed, number, layer)) % 2**63)
