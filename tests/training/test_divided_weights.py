"""Stage 3 of DeepSpeed never holds the whole model: it is divided while it is built, loaded, trained and saved."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from lmlong.checkpoint import read
from lmlong.training import divided_weights
from lmlong.training.module import TrainingModule
from lmlong.training.prepare import prepare_run
from lmlong.training.run import train

from .conftest import Recipes, weights

STAGE_3 = ("training.strategy=deepspeed", "training.deepspeed.stage=3")
UNMOVED = (*STAGE_3, "training.steps=1", "training.learning_rate=1e-30", "training.weight_decay=0")
"""A step that moves weights by less than they differ from each other."""


@pytest.fixture
def gathered(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many weights were whole at a time, whenever some were, and last the numbers that the built model holds."""
    counts: list[int] = []
    original, configure = divided_weights.whole, TrainingModule.configure_model

    @contextmanager
    def whole(weights: list[Any]) -> Iterator[None]:
        if weights:
            counts.append(len(weights))
        with original(weights):
            yield

    def configure_model(module: TrainingModule) -> None:
        configure(module)
        with torch._C.DisableTorchFunction():  # with it, weights seem whole
            counts.append(sum(weight.numel() for weight in module.model.parameters()))

    monkeypatch.setattr(divided_weights, "whole", whole)
    monkeypatch.setattr(TrainingModule, "configure_model", configure_model)
    return counts


KINDS = [
    (["model.attention.kind=[linear, delta]", "model.convolution=3", "model.tied_output=false"], False),
    pytest.param(["model.attention.feature_map=favor", "model.attention.decay=learned"], False, marks=pytest.mark.slow),
    (["objective=masked", "model.attention.kind=linformer", "model.attention.linformer.projected=8"], False),
    (["model.attention.feature_map=taylor", "model.convolution=4"], True),
]
"""What is built, and whether it begins from a run, where its convolutions and its attention are new."""


@pytest.mark.parametrize(("options", "loads"), KINDS, ids=["delta", "favor", "linformer", "loaded"])
def test_weights_are_those_of_one_process_and_whole_one_at_a_time(
    recipe_of: Recipes, four_steps: Path, tmp_path: Path, options: list[str], loads: bool, gathered: list[int]
) -> None:
    options = [*options, f"training.init_from={four_steps}"] if loads else options
    train(recipe_of(*UNMOVED, *options), tmp_path / "run")
    *counts, left = gathered
    assert left == 0 and set(counts) == {1}
    start = read.find(four_steps) if loads else None
    expected, built = prepare_run(recipe_of(*options), start, loads).model.state_dict(), weights(tmp_path / "run")
    assert built.keys() == expected.keys() != weights(four_steps).keys()
    assert all(torch.allclose(built[name], expected[name], rtol=0, atol=1e-25) for name in expected)


def test_last_figure_is_that_of_the_best(recipe_of: Recipes, tmp_path: Path) -> None:
    options = (*STAGE_3, "training.validate_every=1")
    best = train(recipe_of(*options, "training.steps=2"), tmp_path / "run").validation
    worse = (*options, "training.steps=3", "training.learning_rate=5")
    last = train(recipe_of(*worse), tmp_path / "run", resume="auto").validation
    assert best and last and last.nats == pytest.approx(best.nats, rel=1e-6)


LARGE = (
    *("model.width=1024", "model.heads=16", "model.layers=36", "training.optimizer=adamw"),
    *("text.sequence_length=32", "training.batch_size=1", "training.checkpoint_every=2"),
    *("training.validation_tokens=64", "training.final_validation_tokens=0"),
)
"""498 million weights of float32 in 1.99 GB, with AdamW's moments."""


def peaks(recipe: Path, folder: Path, *options: object) -> list[int]:
    """Train by `lmlong train`; the peak memory of each process in bytes."""
    for old in folder.glob("rank-*"):
        old.unlink()
    folder.mkdir(exist_ok=True)
    command = [sys.executable, Path(__file__).with_name("peak_memory.py"), "train", recipe, "--out", folder / "run"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PEAKS": str(folder)}
    child = subprocess.run([*map(str, command), *map(str, options)], env=environment, capture_output=True, text=True)
    assert child.returncode == 0, child.stderr
    return [int(file.read_text()) for file in sorted(folder.glob("rank-*"))]


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc")
def test_two_processes_need_half_the_memory_of_one(tiny: Path, tmp_path: Path) -> None:
    """Built, trained, saved, loaded again and resumed; half, and what a process needs without any model."""
    (one,) = peaks(tiny, tmp_path / "one", *LARGE, "training.steps=2", "training.accumulate=2")
    two = peaks(tiny, tmp_path / "two", *LARGE, *STAGE_3, "training.steps=2", "devices=2")
    resumed = peaks(tiny, tmp_path / "two", *LARGE, *STAGE_3, "training.steps=3", "devices=2", "--resume", "auto")
    print(f"one process {one:,} bytes, each of two {two}, resumed {resumed}")
    assert len(two) == len(resumed) == 2
    assert max(*two, *resumed) <= 0.6 * one
