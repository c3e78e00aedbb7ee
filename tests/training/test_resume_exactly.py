"""An interrupted run ends as the run that was not interrupted, to the last bit: interruptions by what is trained."""

import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from lmlong.attention.device_policy import GPU_POLICY, DevicePolicy
from lmlong.checkpoint import read
from lmlong.model.block import ResidualBlock
from lmlong.training.run import run as train_by
from lmlong.training.run import train

from .conftest import (
    FROM_RUN,
    LAYERS_OF_A_TEACHER,
    SOFTMAX,
    TABLES,
    TEACHER,
    Recipes,
    checkpoint_at,
    logged_steps,
    losses,
    metrics,
    of_run,
    train_until,
    weights,
)

DROPOUT = ("model.dropout=0.2", "training.accumulate=2", "training.batch_size=2")
BLOCKS = "model.downsample={factor: 4, layers: 1}"
CARRY, PASS = "training.carry_state=true", "training.state_passing=0.5"
SEGMENTS = ("training.accumulate=2", "training.segment=16")
LINFORMER, FAVOR = "model.attention.kind=linformer", "model.attention.feature_map=favor"
MASKED = ("objective=masked", *DROPOUT, "model.attention.linformer.projected=8")
HOURGLASS = "model.downsample={factor: 7, kind: conv, layers: 1}"
RESAMPLED = (FAVOR, "model.attention.favor.resample_every=3")
CONSTANT = ("training.schedule=constant", "training.validate_every=5")
ADAMW, INT4, BF16 = "training.optimizer=adamw", "training.quantize=int4", "training.precision=bf16"
WINDOW = "model.attention.window=20"


class Interrupted(NamedTuple):
    """What an interruption has to do with."""

    tiny: Path
    options: tuple[str, ...]
    recipe_of: Recipes
    whole: Path
    run: Path
    raise_at: Callable[[int, signal.Signals], None]


Resumes = list[tuple[Path, Path | str]]
"""Folders in which a run is resumed, and from what."""


def ended(of: Interrupted) -> Resumes:
    """It ends by itself, and is given more steps."""
    train(of.recipe_of(*of.options, "training.steps=5"), of.run)
    return [(of.run, "auto")]


def signalled(of: Interrupted) -> Resumes:
    handlers = signal.getsignal(signal.SIGHUP), signal.getsignal(signal.SIGTERM)
    of.raise_at(5, signal.SIGHUP)
    with pytest.raises(SystemExit) as stopped:
        train(of.recipe_of(*of.options), of.run)
    assert stopped.value.args == (128 + signal.SIGHUP,) and read.find(of.run).name == "step-00000005"
    assert (signal.getsignal(signal.SIGHUP), signal.getsignal(signal.SIGTERM)) == handlers
    return [(of.run, "auto")]


def killed(of: Interrupted) -> Resumes:
    """A process, since it is killed."""
    child = train_until(4, of.tiny, of.run, *of.options)
    child.kill()
    child.communicate()
    assert child.returncode == -signal.SIGKILL and logged_steps(of.run)[-1] < 40
    return [(of.run, "auto")]


def gone_back(of: Interrupted) -> Resumes:
    return [(of.whole, checkpoint_at(of.whole, 5))]


def from_another_folder(of: Interrupted) -> Resumes:
    return [(of.run, checkpoint_at(of.whole, 5))]


def rounded(of: Interrupted) -> Resumes:
    """After, at and before the first step that rounds weights, step 10 of 12."""
    return [(of.whole, checkpoint_at(of.whole, step)) for step in (11, 9, 8)]


class Case(NamedTuple):
    """How a run is interrupted, what it trains, and on what."""

    interrupt: Callable[[Interrupted], Resumes]
    options: tuple[str, ...]
    policy: DevicePolicy | None = None


CASES = {
    "dropout, resampled features": Case(
        killed, (*DROPOUT, *RESAMPLED, "training.steps=40", "training.checkpoint_every=3")
    ),
    "AdamW, tables, rounded weights": Case(rounded, (ADAMW, TABLES, INT4)),
    "rounded weights, passed states": Case(rounded, (BF16, PASS, "training.quantize=int8")),
    "carried states in segments": Case(
        signalled, (CARRY, *SEGMENTS, BF16, "model.attention.kind=[delta, window]", WINDOW)
    ),
    "carried states in blocks": Case(from_another_folder, (CARRY, BLOCKS, "training.segment=18")),
    "passed states in blocks": Case(ended, (PASS, BLOCKS, TABLES, *CONSTANT)),
    "a teacher": Case(from_another_folder, (TEACHER, "training.segment=16", "training.teacher_temperature=2")),
    "layers of a teacher": Case(gone_back, LAYERS_OF_A_TEACHER),
    "added heads alone": Case(
        signalled,
        (
            *(*SOFTMAX, FROM_RUN, "training.only_ngram=true"),
            *("model.add_ngram=[1]", "model.attention.ngram.buckets=64"),
        ),
    ),
    "masked, slots": Case(gone_back, (*MASKED, LINFORMER, "model.attention.linformer.sharing=layerwise")),
    "masked, resampled, in blocks": Case(ended, (*MASKED, *RESAMPLED, HOURGLASS, *CONSTANT)),
    "Muon as on a GPU": Case(gone_back, (), GPU_POLICY),
    "AdamW as on a GPU": Case(gone_back, (ADAMW, PASS), GPU_POLICY),
}

SLOW = {
    "rounded weights in segments": Case(rounded, (*SEGMENTS, "model.dropout=0.1", INT4)),
    "passed states in segments": Case(
        gone_back, (PASS, *SEGMENTS, ADAMW, TABLES, "model.attention.kind=[ngram, window]", WINDOW)
    ),
    "masked, full": Case(killed, (*MASKED, "model.attention.kind=full", "training.steps=40")),
    "masked, efficient": Case(signalled, (*MASKED, "model.attention.kind=efficient")),
    "masked, convolved slots": Case(gone_back, (*MASKED, LINFORMER, "model.attention.linformer.projection=conv")),
    "masked, a pattern in blocks": Case(
        from_another_folder, (*MASKED, "model.attention.kind=[linformer, full]", HOURGLASS)
    ),
}


class Outcome(NamedTuple):
    """All that a run has come to, but for times."""

    metrics: list[dict[str, Any]]
    weights: dict[str, torch.Tensor]
    state: dict[str, torch.Tensor]
    recent: list[float]

    @staticmethod
    def of(run: Path) -> "Outcome":
        lines = [{name: value for name, value in line.items() if name != "tokens_per_second"} for line in metrics(run)]
        state = read.read_training(read.find(run))
        tensors = {name: x for name, x in state.items() if isinstance(x, torch.Tensor)}
        return Outcome(lines, weights(run), tensors, state["recent"])

    def assert_same(self, other: "Outcome") -> None:
        assert (self.metrics, self.recent) == (other.metrics, other.recent)
        for mine, others in ((self.weights, other.weights), (self.state, other.state)):
            assert mine.keys() == others.keys()
            assert [name for name, tensor in mine.items() if not torch.equal(tensor, others[name])] == []


@pytest.mark.parametrize("name", [*CASES, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_interrupted_run_resumes_exactly(
    tiny: Path,
    recipe_of: Recipes,
    softmax: Path,
    tmp_path: Path,
    raise_at: Callable[[int, signal.Signals], None],
    name: str,
) -> None:
    interrupt, options, policy = (CASES | SLOW)[name]
    steps = ("steps=12", "checkpoint_every=1") if interrupt is rounded else ("steps=8", "checkpoint_every=5")
    options = (*(f"training.{each}" for each in (*steps, "keep_last=12")), *of_run(options, softmax))
    whole = tmp_path / "whole"
    train_by(recipe_of(*options), whole, policy=policy)
    expected = Outcome.of(whole)
    for folder, point in interrupt(Interrupted(tiny, options, recipe_of, whole, tmp_path / "run", raise_at)):
        train_by(recipe_of(*options), folder, point, policy=policy)
        Outcome.of(folder).assert_same(expected)
        assert not list((folder / "checkpoints").glob(".*"))
    Outcome.of(whole).assert_same(expected)


@pytest.mark.parametrize("options", [(), (ADAMW, PASS)], ids=["muon", "adamw"])
def test_gpu_run_resumes_from_a_cpu_checkpoint(
    recipe_of: Recipes, trained: Path, tmp_path: Path, options: tuple[str, ...]
) -> None:
    """On a CPU the optimizer counts its steps elsewhere."""
    if options:
        train(recipe_of(*options, "training.checkpoint_every=5", "training.keep_last=9"), tmp_path / "cpu")
    on_cpu = tmp_path / "cpu" if options else trained
    train_by(recipe_of(*options), tmp_path / "mixed", checkpoint_at(on_cpu, 5), policy=GPU_POLICY)
    assert losses(tmp_path / "mixed") == pytest.approx(losses(on_cpu), rel=1e-4)


def test_random_draws_are_repeated(recipe_of: Recipes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a plug-in, by any generator."""

    def add_noise(block: ResidualBlock, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + y * (torch.rand(()) + random.random() + np.random.rand())

    monkeypatch.setattr(ResidualBlock, "add", add_noise)
    options = ("training.schedule=constant", "training.warmup_steps=0", "training.segment=16")
    for run, numbers in (("whole", (6,)), ("resumed", (3, 6))):
        for steps in numbers:
            train(recipe_of(f"training.steps={steps}", *options), tmp_path / run, resume="auto")
    assert losses(tmp_path / "resumed") == losses(tmp_path / "whole")
