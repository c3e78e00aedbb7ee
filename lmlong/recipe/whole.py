"""A whole recipe, and what its sections must agree on."""

from typing import Literal

from pydantic import Field, model_validator

from lmlong.recipe.model import Model
from lmlong.recipe.section import Options, mistake
from lmlong.recipe.text import Text
from lmlong.recipe.training import Training


class Recipe(Options):
    """One training run from text to weights."""

    name: str = Field("run", pattern=r"^[\w][\w.-]*$")
    """Name of the run, whose folder is runs/NAME; a recipe file without it takes the file's name."""
    seed: int = Field(0, ge=0, lt=2**32)
    """Start of every random draw: weights, order of the text, dropout."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to run; auto takes a GPU when there is one."""
    devices: int = Field(1, gt=0)
    """GPUs of a machine to train on together, or processes where there is none; each has a batch of its own."""
    nodes: int = Field(1, gt=0)
    """Machines to train on together, each with as many devices; start `lmlong train` on all by torchrun or SLURM."""
    text: Text = Text()
    model: Model = Model()
    training: Training

    @property
    def processes(self) -> int:
        """How many processes train together, each on a device of its own."""
        return self.nodes * self.devices

    @property
    def sequences_per_step(self) -> int:
        """Sequences that all processes together read before the weights change."""
        return self.processes * self.training.batch_size * self.training.accumulate

    @model_validator(mode="after")
    def check(self) -> "Recipe":
        kinds = self.model.attention.kind
        grows = "softmax" in ([kinds] if isinstance(kinds, str) else kinds)
        for key in ("segment", "carry_state"):
            if grows and getattr(self.training, key):
                raise mistake(
                    f"training.{key}",
                    "the state of softmax attention grows with each token, so it cannot be handed on for ever. Leave "
                    "this out, or let all layers be linear or window attention.",
                )
        if self.text.sequence_length % self.model.factor:
            raise mistake(
                "text.sequence_length",
                f"{self.text.sequence_length} is no multiple of model.downsample.factor, {self.model.factor}. "
                f"Use {-(-self.text.sequence_length // self.model.factor) * self.model.factor}.",
            )
        if self.training.carry_state and self.text.rows == "documents":
            raise mistake("training.carry_state", "whole documents need nothing from the batch before. Leave it out.")
        if self.training.carry_state and self.model.attention.favor.redraw_every:
            raise mistake(
                "training.carry_state",
                "features drawn anew make the states of the old ones meaningless. Leave this out, or redraw_every.",
            )
        return self
