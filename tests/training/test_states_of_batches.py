"""What a row of a batch is read with: the state of another batch or text, rounded weights."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import lmlong
from lmlong.checkpoint import read
from lmlong.checkpoint.location import BEST
from lmlong.data.shuffle import draw
from lmlong.errors import UsageError
from lmlong.model.base import round_weights
from lmlong.model.language_model import LanguageModel
from lmlong.model.layers import Linear
from lmlong.model.loss import IGNORED
from lmlong.model.metrics import batch_tensors, loss_totals, text_nll
from lmlong.model.segments import text_loss
from lmlong.model.state import where_state
from lmlong.training.loader import PASSED
from lmlong.training.module import TrainingModule
from lmlong.training.prepare import prepare_run
from lmlong.training.run import train

from .conftest import Recipes, losses

CARRY, HALF = "training.carry_state=true", "training.state_passing=0.5"

Batch = tuple[Tensor, Tensor, Tensor]
ReadBatch = Callable[[LanguageModel, int, Batch, Any], tuple[Tensor, Any]]
"""From a model, the number of a batch, the batch and the state after the batch before to a loss and a state."""


def carried(model: LanguageModel, number: int, batch: Batch, before: Any) -> tuple[Tensor, Any]:
    return text_loss(model, *batch, before)


def passed(model: LanguageModel, number: int, batch: Batch, before: Any) -> tuple[Tensor, Any]:
    """Some rows begin with the state after the same row of the batch before."""
    tokens, targets, starts = batch
    state = model.init_state(4)
    if number:
        rows = torch.tensor([draw(0, PASSED, number, row) < 2**63 for row in range(4)])
        starts = starts & ~(rows[:, None] & (torch.arange(64) == 0))
        state = where_state(rows, before, state)
    return text_loss(model, tokens, targets, starts, state)


def rounded(model: LanguageModel, number: int, batch: Batch, before: Any) -> tuple[Tensor, Any]:
    round_weights(model, "int4" if number >= 6 else None)
    return text_loss(model, *batch)


@pytest.mark.parametrize(
    ("option", "read_batch", "first"),
    [
        (CARRY, carried, 1),
        (HALF, passed, 1),
        ("training.quantize=int4", rounded, 6),
    ],
)
def test_losses_are_those_of_batches_read_by_hand(
    recipe_of: Recipes, trained: Path, tmp_path: Path, option: str, read_batch: ReadBatch, first: int
) -> None:
    """With weights that do not move; the first batches are read as without the option."""
    recipe = recipe_of(f"training.init_from={trained}", "training.learning_rate=1e-30", "training.steps=8", option)
    validation = train(recipe, tmp_path / "run").validation
    setup = prepare_run(recipe, read.find(trained, BEST))
    assert isinstance(setup.model, LanguageModel) and validation
    state, expected, plain = None, [], []
    for number in range(8):
        batch = batch_tensors(setup.data.training().batch(number))
        with torch.no_grad():
            round_weights(setup.model, None)
            nats = text_loss(setup.model, *batch)[0]
            read_nats, state = read_batch(setup.model, number, batch, state)
        plain.append(float(nats / (batch[1] != IGNORED).sum()))
        expected.append(float(read_nats / (batch[1] != IGNORED).sum()))
    assert losses(tmp_path / "run") == pytest.approx(expected, rel=1e-5)
    effects = [abs(a - b) for a, b in zip(plain, expected, strict=True)]
    assert max(effects[:first]) == 0 and sum(effect > 1e-5 for effect in effects[first:]) >= 2, effects
    if read_batch in (passed, rounded):  # the model is rounded now
        token_bytes = torch.from_numpy(setup.tokens.tokenizer.token_bytes)
        totals = loss_totals(setup.model.eval(), map(batch_tensors, setup.data.validation()), token_bytes)
        assert totals.nats == pytest.approx(validation.nats, rel=1e-6)


def test_each_source_needs_a_row(recipe_of: Recipes, tmp_path: Path) -> None:
    book = f"{{kind: files, paths: [{recipe_of().text.sources[0].paths[0]}]}}"
    sources = f"text.sources=[{book}, {book}]"
    few = recipe_of(CARRY, sources, "training.batch_size=1")
    with pytest.raises(UsageError, match=r"training\.batch_size: .* 1 of 2 sources would get none of 1 rows"):
        train(few, tmp_path / "run")


def test_carried_state_is_carried_through_validation(recipe_of: Recipes, tmp_path: Path) -> None:
    """The figure is that of the parts of the text, each read at once, and not that of short windows."""
    options = (CARRY, "training.steps=40", "text.validation.fraction=0.2")
    outcome = train(recipe_of(*options), tmp_path / "run")
    setup = prepare_run(recipe_of(*options), read.find(tmp_path / "run"))
    batches = [batch_tensors(batch) for batch in setup.data.validation()]
    nats = 0.0
    half = len(batches) // 2  # of the batches: 8 parts are read 4 at a time
    for group in (batches[:half], batches[half:]):
        whole = [torch.cat(part, dim=1) for part in zip(*group, strict=True)]
        nats += float(text_nll(setup.model.eval(), *whole)[0].sum())
    assert outcome.validation is not None and outcome.validation.nats == pytest.approx(nats, rel=1e-5)
    alone = sum(float(text_nll(setup.model, *batch)[0].sum()) for batch in batches)
    assert abs(alone - nats) > 1e-3 * nats


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
