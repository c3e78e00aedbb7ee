"""Training steps in which the output layer learns while it reads: which they are, and their loss."""

from pathlib import Path

import pytest
import torch

from lmlong.checkpoint import read
from lmlong.model.language_model import LanguageModel
from lmlong.model.learning.loss import loss_while_learning
from lmlong.model.loss import IGNORED
from lmlong.model.metrics import batch_tensors
from lmlong.model.segments import text_loss
from lmlong.recipe import Conversion
from lmlong.training.conversion import stages
from lmlong.training.prepare import prepare_run
from lmlong.training.run import train

from .conftest import Recipes, losses


def test_the_last_share_of_the_steps_learns(recipe_of: Recipes, tmp_path: Path) -> None:
    """With weights that do not move, the loss is that of the rows read by hand."""
    train(recipe_of(), tmp_path / "base")
    still = [f"training.init_from={tmp_path / 'base'}", "training.learning_rate=1e-30", "training.steps=6"]
    recipe = recipe_of(*still, "training.learn=0.5")
    train(recipe, tmp_path / "run")
    setup = prepare_run(recipe, read.find(tmp_path / "base"))
    assert isinstance(setup.model, LanguageModel)
    expected, plain = [], []
    for number in range(6):
        tokens, targets, starts = batch_tensors(setup.data.training().batch(number))
        with torch.no_grad():
            nats = [loss(setup.model, tokens, targets, starts)[0] for loss in (text_loss, loss_while_learning)]
        plain.append(float(nats[0] / (targets != IGNORED).sum()))
        expected.append(float(nats[number >= 3] / (targets != IGNORED).sum()))
    assert losses(tmp_path / "run") == pytest.approx(expected, rel=1e-5)
    assert all(abs(a - b) > 1e-3 for a, b in zip(plain[3:], expected[3:], strict=True))


def test_only_the_last_stage_of_a_conversion_learns(recipe_of: Recipes, tmp_path: Path) -> None:
    recipe = recipe_of("training.learn=0.5").model_copy(update={"conversion": Conversion()})
    runs = stages(recipe, str(tmp_path / "old"), tmp_path / "new")
    assert [stage.recipe.training.learn for stage in runs] == [0.0, 0.0, 0.5]
