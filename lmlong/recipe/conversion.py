"""Options of `lmlong convert`: the stages that come before `training`."""

from typing import Annotated

from pydantic import Field

from lmlong.recipe import bounds
from lmlong.recipe.option_types import IsLength
from lmlong.recipe.section import Options
from lmlong.recipe.training import Budget


class Stage(Budget):
    """A stage of a conversion: how long, and how fast."""

    learning_rate: float | None = Field(default=None, gt=0, le=bounds.FACTOR)
    """Peak learning rate of the stage; left out, training.learning_rate."""


class Conversion(Options):
    """`lmlong convert`: the two stages in which a model with new attention learns from the old one, before `training`,
    the last stage, in which it learns from the text alone."""

    layers: Stage = Stage()
    """Each layer learns the output of the old one's, given what that has read; nothing but attention is trained."""
    predictions: Stage = Stage()
    """The whole model learns the predictions of the old one."""
    sequence_length: Annotated[int | None, Field(gt=0, le=bounds.TOKENS), IsLength()] = None
    """Tokens of a sequence in both, of which text.sequence_length is a multiple; left out, as many. A step has as many
    tokens in all stages."""
