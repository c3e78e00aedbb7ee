"""A recipe small enough to train in a second, and a book for it."""

import atexit
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from machine import new_cache

from lmlong.checkpoint import read
from lmlong.model.language_model import LanguageModel
from lmlong.recipe import Recipe
from lmlong.recipe import file as recipe_file
from lmlong.training.run import train

Recipes = Callable[..., Recipe]

WORDS = ["the", "a", "cat", "dog", "bird", "sat", "ran", "flew", "on", "under", "over", "mat", "tree", "and", "then"]

TINY = """
text:
  sources: [{{kind: files, paths: [{book}]}}]
  tokenizer: {{kind: bytes}}
  sequence_length: 64
model: {{width: 32, layers: 2, heads: 2, attention: {{kind: linear}}}}
training:
  steps: 12
  batch_size: 4
  learning_rate: 1e-2
  warmup_steps: 2
  precision: "32"
  validate_every: 6
  checkpoint_every: 4
  log_every: 1
"""


def write_tiny(folder: Path) -> Path:
    """Write the recipe and its book into a folder; the recipe's file."""
    draw = random.Random(0)
    book = folder / "book.txt"
    book.write_text("\n".join(" ".join(draw.choices(WORDS, k=9)) for _ in range(400)))
    file = folder / "tiny.yaml"
    file.write_text(TINY.format(book=book))
    return file


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of the recipe."""
    monkeypatch.setenv("LMLONG_CACHE", str(new_cache(tmp_path)))
    return write_tiny(tmp_path)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the recipe, its book and a cache, for all tests of a file."""
    folder = tmp_path_factory.mktemp("shared")
    write_tiny(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LMLONG_CACHE", str(new_cache(folder)))
        yield folder


@pytest.fixture(scope="module")
def shared_recipe_of(shared: Path) -> Recipes:
    """The recipe of that folder with overrides."""
    return lambda *overrides: recipe_file.load(str(shared / "tiny.yaml"), overrides)


@pytest.fixture(scope="module")
def four_steps(shared: Path, shared_recipe_of: Recipes) -> Path:
    """A run of four steps."""
    train(shared_recipe_of("training.steps=4"), shared / "four_steps")
    return shared / "four_steps"


@pytest.fixture
def run(four_steps: Path, tmp_path: Path) -> Path:
    """A copy of that run."""
    return Path(shutil.copytree(four_steps, tmp_path / "run", symlinks=True))


@pytest.fixture
def recipe_of(tiny: Path) -> Recipes:
    """The recipe with overrides."""
    return lambda *overrides: recipe_file.load(str(tiny), overrides)


Poison = Callable[..., None]


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> Poison:
    """Multiply the loss of some batches, counted from 0, by a factor."""
    original, calls = LanguageModel.loss, 0

    def plant(batches: set[int], factor: float = math.nan) -> None:
        nonlocal calls
        calls = 0

        def loss(self: LanguageModel, *inputs: Any) -> Any:
            nonlocal calls
            nll, state = original(self, *inputs)
            calls += 1
            return (nll * factor if calls - 1 in batches else nll), state

        monkeypatch.setattr(LanguageModel, "loss", loss)

    return plant


def metrics(run: Path) -> list[dict]:
    """The whole lines of a run's metrics log so far."""
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def losses(run: Path) -> list[float]:
    """The training losses that a run has logged."""
    return [line["loss"] for line in metrics(run) if "loss" in line]


def logged_steps(run: Path) -> list[int]:
    """The steps of those losses."""
    return [line["step"] for line in metrics(run) if "loss" in line]


def weights(run: Path) -> dict[str, torch.Tensor]:
    return read.read_weights(read.find(run))


def moments(checkpoint: Path) -> dict[str, torch.Tensor]:
    """The optimizer's moments of all weights."""
    return {name: x for name, x in read.read_training(checkpoint).items() if name.startswith("optimizer.")}


def same_tensors(some: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> bool:
    return some.keys() == others.keys() and all(torch.equal(some[name], others[name]) for name in others)


def equal(run: Path, other: Path) -> bool:
    """Whether losses and weights are the same to the last bit."""
    same_losses = losses(run) == losses(other) and logged_steps(run) == logged_steps(other)
    return same_losses and same_tensors(weights(run), weights(other))


def assert_resumes_exactly(recipe_of: Recipes, folder: Path, *options: str) -> None:
    """A run of 12 steps is the same as one that ends after 5 and is resumed."""
    options = ("training.schedule=constant", *options)
    train(recipe_of(*options), folder / "whole")
    for steps in (5, 12):
        train(recipe_of(f"training.steps={steps}", *options), folder / "parts", resume="auto")
    assert equal(folder / "parts", folder / "whole")


def train_in_processes(recipe: Path, run: Path, *options: object, **more: object) -> tuple[str, str]:
    """Train by `lmlong train`, which starts a process for each further device; its standard output and error."""
    child = lmlong("train", recipe, "--out", run, *options, start_new_session=True, **more)
    output, errors = child.communicate(timeout=150)
    assert child.returncode == 0, errors
    assert output.count("validation ") == 1 and errors.count("parameters") == 1  # the other processes are silent
    return output, errors


def lmlong(*arguments: object, **options: object) -> subprocess.Popen:
    """The command line in a process of its own, which ends at the latest when the tests do."""
    command = [sys.executable, "-m", "lmlong", *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    child = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, **options
    )
    atexit.register(child.kill)
    return child


@contextmanager
def ignored(number: signal.Signals) -> Iterator[None]:
    """Programs that start in here ignore a signal, as a shell has those do that it starts by & (Ctrl-C), or nohup (the
    closed terminal). This is so without code between fork and exec, for which all of this process would be copied."""
    before = signal.signal(number, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(number, before)
