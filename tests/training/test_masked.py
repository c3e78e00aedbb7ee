"""Whole runs of tiny encoders: they learn, their figures are true, and how they are cut up changes nothing."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from lmlong.checkpoint import read
from lmlong.cli.after_training import after_training
from lmlong.errors import CheckpointError
from lmlong.model.metrics import batch_tensors, loss_totals
from lmlong.training.prepare import prepare_run
from lmlong.training.run import train

from .conftest import Recipes, losses, metrics

SLOTS = ["model.attention.kind=linformer", "model.attention.linformer={projected: 16, projection: mean}"]
FULL = "model.attention.kind=full"
BLOCKS = ["model.downsample={factor: 7, kind: conv, layers: 1}"]
HOURGLASS = ["model.layers=3", FULL, "model.downsample={factor: 3, kind: max}"]


@pytest.fixture
def masked(recipe_of: Recipes) -> Recipes:
    """The tiny recipe with an encoder's objective."""
    return lambda *overrides: recipe_of("objective=masked", *overrides)


@pytest.mark.parametrize(
    ("options", "steps"), [(HOURGLASS, 60), pytest.param(SLOTS, 200, marks=pytest.mark.slow)], ids=["full", "linformer"]
)
def test_encoder_learns_from_both_sides(masked: Recipes, tmp_path: Path, options: list[str], steps: int) -> None:
    """Letters in turn, each as frequent as the others: only the visible ones around tell a hidden one."""
    (tmp_path / "book.txt").write_text("abcdefgh" * 2000)
    longer = [f"training.steps={steps}", "training.batch_size=8", f"text.sources.0.paths=[{tmp_path}/book.txt]"]
    outcome = train(masked(*longer, "training.validate_every=150", *options), tmp_path / "run")
    assert outcome.validation is not None and outcome.baselines is None
    assert outcome.validation.nats_per_token < 0.3 * math.log(8)


def test_figures_are_those_of_the_weights(masked: Recipes, tmp_path: Path) -> None:
    outcome = train(masked(), tmp_path / "run")
    setup = prepare_run(masked(), read.find(tmp_path / "run"))
    batches = [batch_tensors(batch) for batch in setup.data.validation()]
    again = loss_totals(setup.model.eval(), batches, torch.from_numpy(setup.tokens.tokenizer.token_bytes))
    assert outcome.validation is not None
    assert again.nats == pytest.approx(outcome.validation.nats, rel=1e-6)
    assert again.tokens == outcome.validation.tokens == sum(int((t != -100).sum()) for _, t, _ in batches)

    lines = metrics(tmp_path / "run")
    assert after_training(outcome).startswith("validation   perplexity ")
    validation = lines[-1]["validation"]
    assert validation["perplexity"] == pytest.approx(math.exp(again.nats / again.tokens), rel=1e-6)
    assert "bits_per_byte" not in validation
    step = next(line for line in lines if "loss" in line)
    assert step["perplexity"] == pytest.approx(math.exp(step["loss"])) and "bits_per_byte" not in step
    validated = {line["step"]: line["validation"]["perplexity"] for line in lines if "validation" in line}
    best = read.find(tmp_path / "run" / "checkpoints" / "best")
    assert int(best.name[5:]) == min(validated, key=lambda at: validated[at])


@pytest.mark.parametrize("rows", ["windows", "documents"])
def test_downsampling_reads_the_same_batches(masked: Recipes, rows: str) -> None:
    flat, hourglass = (prepare_run(masked(f"text.rows={rows}", *options)).data for options in ([], BLOCKS))
    for step in range(3):
        pairs = zip(flat.training().batch(step), hourglass.training().batch(step), strict=True)
        assert all(np.array_equal(mine, others) for mine, others in pairs)


def test_fine_tuning_takes_weights_of_an_encoder(recipe_of: Recipes, masked: Recipes, tmp_path: Path) -> None:
    train(masked(FULL), tmp_path / "base")
    start = f"training.init_from={tmp_path / 'base'}"
    train(masked(*SLOTS, start, "training.steps=1"), tmp_path / "tuned")
    assert losses(tmp_path / "tuned")[0] < losses(tmp_path / "base")[0] - 0.3
    with pytest.raises(CheckpointError, match="embedding"):
        train(recipe_of(start), tmp_path / "causal")
