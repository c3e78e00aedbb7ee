"""A run whose rows are read in parts by several processes is the same as one of a single process."""

import os
import signal
import time
from pathlib import Path

import pytest

from lmlong.errors import RecipeError
from lmlong.training.run import train

from .conftest import Recipes, lmlong, logged_steps, losses, metrics, train_in_processes

ROWS = ("text.sequence_length=61", "training.batch_size=2", "training.steps=8", "training.schedule=constant")


def parts(number: int, *options: str) -> tuple[str, ...]:
    return *ROWS, f"devices={number}", f"training.sequence_parallel={number}", *options


def figures(run: Path) -> list[list[float]]:
    """What a run reports: losses, norms of gradients, and validations with the tokens that they count."""
    steps = [[line["loss"], line["gradient_norm"], line["learning_rate"]] for line in metrics(run) if "loss" in line]
    scores = [line["validation"] for line in metrics(run) if "validation" in line]
    return [*steps, *([score["nats"], score["tokens"], score["bytes"]] for score in scores)]


def assert_same(some: Path, other: Path, rel: float = 1e-5) -> None:
    for got, expected in zip(figures(some), figures(other), strict=True):
        assert got == pytest.approx(expected, rel=rel)


@pytest.mark.parametrize(
    "options",
    [
        ["training.state_passing=0.5", "model.attention.kind=[delta, window]", "model.attention.window=20"],
        pytest.param(["training.carry_state=true", "training.activation_checkpointing=true"], marks=pytest.mark.slow),
        pytest.param(["model.attention.kind=[ngram, softmax]", "training.accumulate=2"], marks=pytest.mark.slow),
        pytest.param(["training.strategy=deepspeed", "training.deepspeed.stage=3"], marks=pytest.mark.slow),
        pytest.param(
            ["model.attention.feature_map=favor", "model.attention.favor.resample_every=3"], marks=pytest.mark.slow
        ),
    ],
    ids=["states passed", "states carried", "n-grams", "stage 3", "resampled"],
)
def test_two_processes_are_one(tiny: Path, recipe_of: Recipes, tmp_path: Path, options: list[str]) -> None:
    train_in_processes(tiny, tmp_path / "two", *parts(2, *options))
    alone = [option for option in options if "deepspeed" not in option]
    train(recipe_of(*ROWS, *alone), tmp_path / "one")
    assert_same(tmp_path / "two", tmp_path / "one")


@pytest.mark.slow
def test_a_killed_run_is_resumed_by_fewer_and_by_more(tiny: Path, recipe_of: Recipes, tmp_path: Path) -> None:
    options = ("training.steps=40", "training.state_passing=0.5", "training.checkpoint_every=10")
    deepspeed = ("training.strategy=deepspeed", "training.deepspeed.stage=2")
    run = tmp_path / "two"
    child = lmlong("train", tiny, *parts(2, *options, *deepspeed), "--out", run, start_new_session=True)
    while not (run / "checkpoints" / "step-00000020" / "manifest.json").exists() and child.poll() is None:
        time.sleep(0.01)
    os.killpg(child.pid, signal.SIGKILL)
    child.communicate(timeout=60)
    assert child.returncode == -signal.SIGKILL and max(logged_steps(run)) < 40
    middle = run / "checkpoints" / "step-00000020"
    train(recipe_of(*ROWS, *options), tmp_path / "one")
    train(recipe_of(*ROWS, *options), tmp_path / "fewer", resume=str(middle))
    train_in_processes(tiny, tmp_path / "more", *parts(4, *options, *deepspeed), "--resume", middle)
    assert logged_steps(tmp_path / "more") == logged_steps(tmp_path / "one") == list(range(1, 41))
    for resumed in ("fewer", "more"):
        assert losses(tmp_path / resumed) == pytest.approx(losses(tmp_path / "one"), rel=1e-5)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["training.segment=16"], "segment=16: the parts of a row exchange states layer by layer"),
        (["training.compile=true"], "compile=true: the exchange between the parts of a row cannot be compiled"),
        (["model.dropout=0.1"], "sequence_parallel=2: not supported with model.dropout"),
        (["model.layers=3", "model.downsample.factor=2"], "sequence_parallel=2: not supported with model.downsample"),
        (["training.sequence_parallel=3"], "3 devices read a row together, but each machine has devices: 2"),
        (
            ["devices=128", "training.sequence_parallel=128"],
            "rows of 64 tokens cannot be divided into 128 parts. Use fewer devices.",
        ),
        (["objective=masked"], "training.sequence_parallel=2: an encoder reads its text at once"),
    ],
)
def test_what_cannot_be_divided_is_refused_by_name(recipe_of: Recipes, options: list[str], why: str) -> None:
    with pytest.raises(RecipeError, match=why):
        recipe_of("devices=2", "training.sequence_parallel=2", *options)
