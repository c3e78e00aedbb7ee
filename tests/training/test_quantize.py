"""Training for quantized decoding: a run decodes with the values it trained."""

from pathlib import Path

import pytest
import torch

import lmlong
from lmlong.model.base import round_weights
from lmlong.model.language_model import LanguageModel
from lmlong.model.layers import Linear
from lmlong.training.module import TrainingModule
from lmlong.training.run import train

from .conftest import Recipes, losses


@pytest.mark.parametrize("rounding", ["int4", pytest.param("int8", marks=pytest.mark.slow)])
def test_decoding_has_the_trained_values(recipe_of: Recipes, tmp_path: Path, rounding: str) -> None:
    """The matrices of a run, quantized when it is loaded, are to the bit those of the last forward pass."""
    recipe = recipe_of(f"training.quantize={rounding}", "model.tied_output=false", "training.steps=4")
    train(recipe, tmp_path / "run")
    trained, loaded = lmlong.load(tmp_path / "run").model, lmlong.load(tmp_path / "run", weights=rounding).model
    round_weights(trained, rounding)
    matrices = {name: module for name, module in trained.named_modules() if isinstance(module, Linear)}
    assert len(matrices) == 4 * 2
    for name, module in matrices.items():
        with torch.no_grad():
            multiplied_by = module(torch.eye(module.in_features)).mT
        assert torch.equal(loaded.get_submodule(name).dequantized(torch.float32), multiplied_by)
    assert torch.equal(loaded.lm_head.matrix(torch.float32), trained.lm_head.matrix(torch.float32))


def test_last_quarter_of_time_is_rounded(
    recipe_of: Recipes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ticking: None
) -> None:
    """The share is of the steps that are expected to fit."""
    seen: list[bool] = []
    take = TrainingModule.take_figures

    def look(module: TrainingModule) -> object:
        assert isinstance(module.model, LanguageModel)
        seen.append(module.model.lm_head.rounding is not None)
        return take(module)

    monkeypatch.setattr(TrainingModule, "take_figures", look)
    minutes = ("training.steps=null", "training.minutes=0.1", "training.validate_every=100")
    train(recipe_of(*minutes, "training.quantize=int4"), tmp_path / "run")
    assert seen == sorted(seen) and 0.1 < sum(seen) / len(seen) < 0.4


def test_student_rounds_and_teacher_does_not(recipe_of: Recipes, trained: Path, tmp_path: Path) -> None:
    """Its teacher does not: a run with its own weights as the teacher and without rounding learns nothing."""
    still = [f"training.{key}={trained}" for key in ("init_from", "teacher")]
    still += ["training.learning_rate=1e-30", "training.steps=4"]
    for name, more in (("plain", []), ("rounded", ["training.quantize=int4"])):
        train(recipe_of(*still, *more), tmp_path / name)
    plain, rounded = losses(tmp_path / "plain"), losses(tmp_path / "rounded")
    assert plain[:3] == rounded[:3] and abs(plain[3] - rounded[3]) > 1e-4
