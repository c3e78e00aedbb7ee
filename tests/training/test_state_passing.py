"""Rows that begin with the state after another text: which they are, what they read from, and exact resume."""

import time
from pathlib import Path

import pytest
import torch

from lmlong.checkpoint import read
from lmlong.data.shuffle import draw
from lmlong.errors import RecipeError
from lmlong.model.loss import IGNORED
from lmlong.model.metrics import batch_tensors
from lmlong.model.segments import text_loss
from lmlong.model.state import detach_state, where_state
from lmlong.training.loader import PASSED
from lmlong.training.prepare import prepare_run
from lmlong.training.run import train

from .conftest import Recipes, assert_resumes_exactly, equal, lmlong, losses, metrics

HALF = "training.state_passing=0.5"


def test_a_share_of_the_rows_reads_on_from_another_text(recipe_of: Recipes, tmp_path: Path) -> None:
    """With weights that do not move, the loss is that of rows read by hand, some from the state of the row before."""
    train(recipe_of(), tmp_path / "base")  # for a fresh model makes nothing of its state
    still = [f"training.init_from={tmp_path / 'base'}", "training.learning_rate=1e-30", "training.steps=6", HALF]
    train(recipe_of(*still), tmp_path / "run")
    setup = prepare_run(recipe_of(*still), read.find(tmp_path / "base"))
    before, expected, rows = None, [], []
    for number in range(6):
        tokens, targets, starts = batch_tensors(setup.data.training().batch(number))
        state = setup.model.init_state(4)
        if before is not None:
            passed = torch.tensor([draw(0, PASSED, number, row) < 2**63 for row in range(4)])
            starts = starts & ~(passed[:, None] & (torch.arange(64) == 0))
            state = where_state(passed, before, state)
            rows += passed.tolist()
        with torch.no_grad():
            nats, after = text_loss(setup.model, tokens, targets, starts, state)
        before = detach_state(after)
        expected.append(float(nats / (targets != IGNORED).sum()))
    assert losses(tmp_path / "run") == pytest.approx(expected, rel=1e-5)
    assert 5 <= sum(rows) <= 15, "of 20, about a half"
    assert before is not None and before.position.max() > 64, "positions go on"


def test_every_row_of_a_share_of_one_goes_on_for_ever(recipe_of: Recipes, tmp_path: Path) -> None:
    train(recipe_of("training.state_passing=1.0", "text.validation.fraction=0.5"), tmp_path / "run")
    state = read.read_training(read.find(tmp_path / "run"))
    (position,) = (x for name, x in state.items() if name.startswith("carried.") and x.dtype == torch.int64)
    assert (position > 64).any(), "but where a document has begun since"


OPTIONS = [
    [
        "training.accumulate=2",
        "training.segment=16",
        "model.attention.kind=[ngram, window]",
        "model.attention.window=20",
    ],
    ["model.downsample={factor: 4, layers: 1}"],
]


@pytest.mark.parametrize(
    "options", [pytest.param(OPTIONS[0], marks=pytest.mark.slow), OPTIONS[1]], ids=["segments and window", "blocks"]
)
def test_a_run_resumes_exactly(recipe_of: Recipes, tmp_path: Path, options: list[str]) -> None:
    assert_resumes_exactly(recipe_of, tmp_path, HALF, *options)


@pytest.mark.slow
def test_a_run_killed_resumes_exactly(tiny: Path, recipe_of: Recipes, tmp_path: Path) -> None:
    often = (HALF, "training.steps=40", "training.checkpoint_every=3")
    child = lmlong("train", tiny, *often, "--out", tmp_path / "cut")
    while len(metrics(tmp_path / "cut")) < 8 and child.poll() is None:
        time.sleep(0.001)
    child.kill()
    child.communicate(timeout=120)
    assert child.returncode == -9
    train(recipe_of(*often), tmp_path / "cut", resume="auto")
    train(recipe_of(*often), tmp_path / "whole")
    assert equal(tmp_path / "cut", tmp_path / "whole")


@pytest.mark.parametrize(
    "options",
    [
        ["model.attention.kind=softmax"],
        ["text.rows=documents"],
        ["objective=masked", "model.attention.kind=full"],
        ["model.attention.feature_map=favor", "model.attention.favor.resample_every=5"],
    ],
)
def test_what_has_no_state_to_pass_is_refused(recipe_of: Recipes, options: list[str]) -> None:
    with pytest.raises(RecipeError, match=r"training\.state_passing"):
        recipe_of(HALF, *options)
