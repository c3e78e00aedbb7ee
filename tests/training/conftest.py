"""A recipe small enough to train in a second, a book for it, and runs that all tests share."""

import atexit
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from machine import new_cache

from lmlong.checkpoint import read
from lmlong.recipe import Recipe
from lmlong.recipe import file as recipe_file
from lmlong.training import module
from lmlong.training.progress import CLOCKS, Progress
from lmlong.training.run import train
from lmlong.training.signals import StopOnSignal

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


SOFTMAX = ("model.attention.kind=softmax", "model.convolution=0")
TABLES = "model.ngram_embedding={rows: 512, width: 8}"
RUN = "RUN"
"""Stands for the run of a softmax model in options."""
TEACHER, FROM_RUN = f"training.teacher={RUN}", f"training.init_from={RUN}"
LAYERS_OF_A_TEACHER = (TEACHER, FROM_RUN, "training.teacher_of=layers", "model.attention.feature_map=hedgehog")


def of_run(options: Iterable[str], run: Path) -> tuple[str, ...]:
    """Options with the folder of a run where they have RUN."""
    return tuple(option.replace(RUN, str(run)) for option in options)


def sharded(stage: int, folder: Path) -> tuple[str, ...]:
    """Options for a stage of DeepSpeed, with no weight too small to be divided."""
    settings = folder / "settings.json"
    settings.write_text(json.dumps({"zero_optimization": {"stage3_param_persistence_threshold": 0}}))
    deepspeed = (f"training.deepspeed.stage={stage}", f"training.deepspeed.config={settings}")
    return "training.strategy=deepspeed", *deepspeed


def write_tiny(folder: Path) -> Path:
    """Write the recipe and its book into a folder; the recipe's file."""
    draw = random.Random(0)
    book = folder / "book.txt"
    book.write_text("\n".join(" ".join(draw.choices(WORDS, k=9)) for _ in range(400)))
    file = folder / "tiny.yaml"
    file.write_text(TINY.format(book=book))
    return file


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the recipe, its book and a cache, for all tests."""
    folder = tmp_path_factory.mktemp("shared")
    write_tiny(folder)
    new_cache(folder)
    return folder


@pytest.fixture(scope="module", autouse=True)
def cache(shared: Path) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LMLONG_CACHE", str(shared / "cache"))
        yield shared / "cache"


@pytest.fixture(scope="session")
def tiny(shared: Path) -> Path:
    """The file of the recipe."""
    return shared / "tiny.yaml"


@pytest.fixture(scope="session")
def recipe_of(tiny: Path) -> Recipes:
    """The recipe with overrides."""
    return lambda *overrides: recipe_file.load(str(tiny), overrides)


Trains = Callable[..., Path]


@pytest.fixture(scope="session")
def train_shared(shared: Path, recipe_of: Recipes) -> Trains:
    """Train a run that all tests share, once, by its name and overrides."""

    def trained(name: str, *overrides: str) -> Path:
        if not (shared / name).exists():
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("LMLONG_CACHE", str(shared / "cache"))
                train(recipe_of(*overrides), shared / name)
        return shared / name

    return trained


@pytest.fixture(scope="session")
def four_steps(train_shared: Trains) -> Path:
    """A run of four steps."""
    return train_shared("four_steps", "training.steps=4")


@pytest.fixture(scope="session")
def trained(train_shared: Trains) -> Path:
    """A run of 12 steps with all of its checkpoints, each validated, and a logger's files."""
    often = ("training.validate_every=1", "training.checkpoint_every=1", "training.keep_last=12")
    return train_shared("trained", *often, "training.loggers=[tensorboard]")


@pytest.fixture(scope="session")
def softmax(train_shared: Trains) -> Path:
    """A run of 40 steps with softmax attention."""
    return train_shared("softmax", *SOFTMAX, "training.steps=40")


@pytest.fixture
def run(four_steps: Path, tmp_path: Path) -> Path:
    """A copy of the run of four steps."""
    return copied(four_steps, tmp_path / "run")


TICK = 0.1
"""Seconds between two looks at the clock of `ticking`."""


@pytest.fixture
def ticking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the wall clock advance by one tick whenever it is read, however long a step takes."""
    ticks = count()
    monkeypatch.setitem(CLOCKS, "wall", lambda: TICK * next(ticks))


Poison = Callable[..., None]


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> Poison:
    """Multiply the loss of some batches, counted from 0, by a factor."""
    original, calls = module.text_loss, 0

    def plant(batches: set[int], factor: float = math.nan) -> None:
        nonlocal calls
        calls = 0

        def loss(*inputs: Any, **options: Any) -> Any:
            nonlocal calls
            nll, state = original(*inputs, **options)
            calls += 1
            return (nll * factor if calls - 1 in batches else nll), state

        monkeypatch.setattr(module, "text_loss", loss)

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


def copied(run: Path, to: Path) -> Path:
    return Path(shutil.copytree(run, to, symlinks=True))


def kept_steps(run: Path) -> list[int]:
    """The steps of the checkpoints in a run's folder."""
    return sorted(int(path.name[5:]) for path in (run / "checkpoints").glob("step-*"))


def checkpoint_at(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:08d}"


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


def train_until(lines: int, recipe: Path, run: Path, *options: object, **more: object) -> subprocess.Popen:
    """Train, or resume, in a process of its own until it has logged this many further lines."""
    before = len(metrics(run))
    child = lmlong("train", recipe, *options, "--out", run, "--resume", "auto", start_new_session=True, **more)
    while len(metrics(run)) < before + lines:
        time.sleep(0.002)
        assert child.poll() is None, child.communicate()
    return child


@pytest.fixture
def raise_at(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, signal.Signals], None]:
    """Raise a signal in this process after a step."""

    def plant(chosen: int, number: signal.Signals) -> None:
        log = Progress.step

        def step_with_signal(progress: Progress, step: int, *more: Any) -> float:
            if step == chosen:
                signal.raise_signal(number)
            return log(progress, step, *more)

        monkeypatch.setattr(Progress, "step", step_with_signal)
        monkeypatch.setattr(StopOnSignal, "_discard_output", staticmethod(lambda: None))  # this terminal is still open

    return plant


@contextmanager
def ignored(number: signal.Signals) -> Iterator[None]:
    """Programs that start in here ignore a signal, as a shell has those do that it starts by & (Ctrl-C), or nohup (the
    closed terminal). This is so without code between fork and exec, for which all of this process would be copied."""
    before = signal.signal(number, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(number, before)
