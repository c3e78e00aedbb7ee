"""A batch that is read in parts, in segments and with recomputed activations takes the step of the whole batch."""

from pathlib import Path

import pytest
import torch

from lmlong.checkpoint import read
from lmlong.training.run import train

from .conftest import LAYERS_OF_A_TEACHER, TABLES, TEACHER, Recipes, losses, of_run

PARTS = ("training.batch_size=2", "training.accumulate=2")
SEGMENTS = ("training.segment=16",)
RECOMPUTED = ("training.activation_checkpointing=true",)

DIVIDED: dict[str, tuple[tuple[str, ...], tuple[str, ...], float]] = {
    "plain": ((), (*PARTS, *SEGMENTS, *RECOMPUTED), 1e-4),
    "rows": ((), ("training.batch_size=1", "training.accumulate=4"), 1e-4),
    "tables": ((TABLES,), (*PARTS, *SEGMENTS), 1e-4),
    "a teacher": ((TEACHER, "training.teacher_share=0.9"), (*PARTS, *SEGMENTS, *RECOMPUTED), 1e-4),
    "layers of a teacher": (LAYERS_OF_A_TEACHER, (*PARTS, *RECOMPUTED), 1e-3),
}
"""What is trained, how it is divided, and the relative error of the losses."""


@pytest.mark.parametrize("name", DIVIDED)
def test_divided_batch_trains_the_same(recipe_of: Recipes, softmax: Path, tmp_path: Path, name: str) -> None:
    trained, divided, error = DIVIDED[name]
    options = ("training.steps=6", *of_run(trained, softmax))
    for folder, more in (("whole", ()), ("divided", divided)):
        train(recipe_of(*options, *more), tmp_path / folder)
    assert losses(tmp_path / "divided") == pytest.approx(losses(tmp_path / "whole"), rel=error)
    if name == "tables":
        whole, squares = (read.read_training(read.find(tmp_path / run))["row_squares"] for run in ("whole", "divided"))
        assert 0.02 < float((whole > 0).float().mean()) < 0.98
        assert torch.allclose(squares, whole, rtol=1e-2, atol=1e-12)
