"""States carried from batch to batch: each row reads on, and a checkpoint remembers where and what."""

from pathlib import Path

import pytest
import torch

from lmlong.checkpoint import read
from lmlong.errors import UsageError
from lmlong.model.loss import IGNORED
from lmlong.model.metrics import batch_tensors, text_nll
from lmlong.model.segments import text_loss
from lmlong.training.prepare import prepare_run
from lmlong.training.run import train

from .conftest import Recipes, assert_resumes_exactly, losses

CARRY = "training.carry_state=true"


def test_the_loss_is_that_of_one_long_text(recipe_of: Recipes, tmp_path: Path) -> None:
    """With weights that do not move, three batches of 64 tokens lose what one of 192 does."""
    train(recipe_of(), tmp_path / "base")  # for a fresh model makes nothing of its state
    still = [f"training.init_from={tmp_path / 'base'}", "training.learning_rate=1e-30", "training.steps=3", CARRY]
    train(recipe_of(*still), tmp_path / "run")
    setup = prepare_run(recipe_of(*still), read.find(tmp_path / "base"))
    parts = [batch_tensors(setup.data.training().batch(number)) for number in range(3)]
    tokens, targets, starts = (torch.cat(part, dim=1) for part in zip(*parts, strict=True))
    with torch.no_grad():
        nats, _ = text_loss(setup.model, tokens, targets, starts)
        scored = (targets != IGNORED).sum()
        alone = [text_loss(setup.model, *part) for part in parts]
    assert sum(losses(tmp_path / "run")) / 3 == pytest.approx(float(nats / scored), rel=1e-4)
    assert sum(float(nats) for nats, _ in alone) != pytest.approx(float(nats), rel=1e-6)


def test_each_source_needs_a_row(recipe_of: Recipes, tmp_path: Path) -> None:
    book = f"{{kind: files, paths: [{recipe_of().text.sources[0].paths[0]}]}}"
    sources = f"text.sources=[{book}, {book}]"
    few = recipe_of(CARRY, sources, "training.batch_size=1")
    with pytest.raises(UsageError, match=r"training\.batch_size: .* 1 of 2 sources would get none of 1 rows"):
        train(few, tmp_path / "run")


OPTIONS = [
    [
        "training.accumulate=2",
        "training.segment=16",
        "model.attention.kind=[linear, window]",
        "model.attention.window=20",
    ],
    ["model.downsample={factor: 4, layers: 1}", "training.segment=18"],
    ["training.precision=bf16", "model.attention.kind=[delta, window, ngram]", "model.layers=3"],
]


@pytest.mark.parametrize("options", OPTIONS, ids=["segments and window", "blocks", "bf16"])
def test_a_run_resumes_exactly(recipe_of: Recipes, tmp_path: Path, options: list[str]) -> None:
    assert_resumes_exactly(recipe_of, tmp_path, CARRY, *options)


def test_it_is_validated_along_its_state(recipe_of: Recipes, tmp_path: Path) -> None:
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


def test_what_is_carried_is_in_the_checkpoint(recipe_of: Recipes, tmp_path: Path) -> None:
    train(recipe_of(CARRY), tmp_path / "carried")
    train(recipe_of(), tmp_path / "not")
    carried, none = (
        [x for part, x in read.read_training(read.find(tmp_path / name)).items() if part.startswith("carried.")]
        for name in ("carried", "not")
    )
    assert none == []
    assert [len(tensor) for tensor in carried] == [4] * len(carried)
    assert all(tensor.isfinite().all() for tensor in carried)
    assert losses(tmp_path / "carried") != losses(tmp_path / "not")
