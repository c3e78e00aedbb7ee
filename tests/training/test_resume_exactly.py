"""A run that is interrupted, in whatever way and whatever it trains, ends as the run that was not: to the last bit."""

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from lmlong.attention.device_policy import GPU_POLICY
from lmlong.checkpoint import read
from lmlong.training import run as training
from lmlong.training.run import train

from .conftest import SOFTMAX, Recipes, checkpoint_at, copied, equal, logged_steps, metrics, train_until, weights

DROPOUT = ["model.dropout=0.2", "training.accumulate=2", "training.batch_size=2"]
TABLES = "model.ngram_embedding={rows: 64, width: 8}"
BLOCKS = "model.downsample={factor: 4, layers: 1}"
CARRY, PASS = "training.carry_state=true", "training.state_passing=0.5"
SEGMENTS = ["training.accumulate=2", "training.segment=16"]
MASKED = ["objective=masked", *DROPOUT, "model.attention.linformer.projected=8"]
HOURGLASS = "model.downsample={factor: 7, kind: conv, layers: 1}"
RUN = "RUN"
"""Stands for the run of a softmax model."""

STRATEGIES: dict[str, list[str]] = {
    "dropout, accumulation, resampled features": [
        *DROPOUT,
        "model.attention.feature_map=favor",
        "model.attention.favor.resample_every=3",
    ],
    "AdamW, tables, rounded weights": ["training.optimizer=adamw", TABLES, "training.quantize=int4"],
    "rounded weights and passed states": ["training.precision=bf16", PASS, "training.quantize=int8"],
    "carried states in segments": [
        *(CARRY, *SEGMENTS, "training.precision=bf16"),
        *("model.attention.kind=[delta, window]", "model.attention.window=20"),
    ],
    "carried states in blocks": [CARRY, BLOCKS, "training.segment=18"],
    "passed states in blocks": [PASS, BLOCKS, TABLES],
    "a teacher": [f"training.teacher={RUN}", "training.segment=16", "training.teacher_temperature=2"],
    "layers of a teacher": [
        *(f"training.teacher={RUN}", f"training.init_from={RUN}", "training.teacher_of=layers"),
        "model.attention.feature_map=hedgehog",
    ],
    "added heads alone": [
        *(*SOFTMAX, f"training.init_from={RUN}", "training.only_ngram=true"),
        *("model.add_ngram=[1]", "model.attention.ngram.buckets=64"),
    ],
    "masked, in layerwise slots": [
        *(*MASKED, "model.attention.kind=linformer", "model.attention.linformer.sharing=layerwise"),
    ],
    "masked, resampled, in blocks": [
        *(*MASKED, "model.attention.feature_map=favor", "model.attention.favor.resample_every=3", HOURGLASS),
    ],
}

MORE: dict[str, list[str]] = {
    "rounded weights in segments": [*SEGMENTS, "model.dropout=0.1", "training.quantize=int4"],
    "passed states in segments": [
        *(PASS, *SEGMENTS, "training.optimizer=adamw", TABLES),
        *("model.attention.kind=[ngram, window]", "model.attention.window=20"),
    ],
    "masked, full": [*MASKED, "model.attention.kind=full"],
    "masked, efficient": [*MASKED, "model.attention.kind=efficient"],
    "masked, convolved slots": [
        *(*MASKED, "model.attention.kind=linformer", "model.attention.linformer.projection=conv"),
    ],
    "masked, a pattern in blocks": [*MASKED, "model.attention.kind=[linformer, full]", HOURGLASS],
}

ROUNDED = (11, 9, 8)
"""Resumed after, at and before the first step that rounds weights, step 10 of 12."""


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
        tensors = {name: x for name, x in state.items() if isinstance(x, torch.Tensor) and "random" not in name}
        return Outcome(lines, weights(run), tensors, state["recent"])

    def assert_same(self, other: "Outcome") -> None:
        assert (self.metrics, self.recent) == (other.metrics, other.recent)
        for mine, others in ((self.weights, other.weights), (self.state, other.state)):
            assert mine.keys() == others.keys()
            assert [name for name, tensor in mine.items() if not torch.equal(tensor, others[name])] == []


@pytest.mark.parametrize("name", [*STRATEGIES, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE)])
def test_whatever_is_trained_resumes_exactly(recipe_of: Recipes, softmax: Path, tmp_path: Path, name: str) -> None:
    options = [option.replace(RUN, str(softmax)) for option in (STRATEGIES | MORE)[name]]
    run, recipe = tmp_path / "run", recipe_of("training.checkpoint_every=1", "training.keep_last=12", *options)
    train(recipe, run)
    whole = Outcome.of(run)
    for step in ROUNDED if "rounded" in name else (5,):
        train(recipe, run, resume=str(checkpoint_at(run, step)))
        Outcome.of(run).assert_same(whole)


@pytest.mark.parametrize("options", [[], ["training.optimizer=adamw", PASS]], ids=["muon", "adamw"])
def test_a_run_as_on_a_gpu_resumes_exactly_and_from_a_checkpoint_of_a_cpu(
    recipe_of: Recipes, tmp_path: Path, options: list[str]
) -> None:
    """On a CPU the optimizer counts its steps elsewhere."""
    recipe = recipe_of("training.checkpoint_every=1", "training.keep_last=12", *options)
    train(recipe, tmp_path / "cpu")
    on_cpu = checkpoint_at(tmp_path / "cpu", 5)
    for folder, point in (("whole", None), ("whole", checkpoint_at(tmp_path / "whole", 5)), ("mixed", on_cpu)):
        before = Outcome.of(tmp_path / folder) if point and folder == "whole" else None
        training.run(recipe, tmp_path / folder, point, policy=GPU_POLICY)
        if before:
            Outcome.of(tmp_path / folder).assert_same(before)
    nats = [[line["loss"] for line in metrics(tmp_path / name) if "loss" in line] for name in ("whole", "mixed")]
    assert nats[0] == pytest.approx(nats[1], rel=1e-4)


STEPS = 40
OPTIONS = (
    *(*DROPOUT, "training.schedule=constant", "training.validate_every=10"),
    *("training.checkpoint_every=3", "training.keep_last=20"),
)


@pytest.fixture(scope="module")
def whole(recipe_of: Recipes, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that is not interrupted."""
    run = tmp_path_factory.mktemp("whole") / "run"
    train(recipe_of(*OPTIONS, f"training.steps={STEPS}"), run)
    return run


class Interrupted(NamedTuple):
    """What an interruption has to do with."""

    tiny: Path
    recipe_of: Recipes
    whole: Path
    run: Path
    raise_at: Callable[[int, signal.Signals], None]


def by_its_end(of: Interrupted) -> str:
    train(of.recipe_of(*OPTIONS, "training.steps=20"), of.run)
    return "auto"


def by_a_signal(of: Interrupted) -> str:
    handlers = signal.getsignal(signal.SIGHUP), signal.getsignal(signal.SIGTERM)
    of.raise_at(20, signal.SIGHUP)
    with pytest.raises(SystemExit) as stopped:
        train(of.recipe_of(*OPTIONS, f"training.steps={STEPS}"), of.run)
    assert stopped.value.args == (128 + signal.SIGHUP,) and read.find(of.run).name == "step-00000020"
    assert (signal.getsignal(signal.SIGHUP), signal.getsignal(signal.SIGTERM)) == handlers
    return "auto"


def by_a_kill(of: Interrupted, times: int = 1) -> str:
    """A process, for what is killed."""
    for _ in range(times):
        child = train_until(4, of.tiny, of.run, *OPTIONS, f"training.steps={STEPS}")
        child.kill()
        child.communicate()
        assert child.returncode == -signal.SIGKILL and logged_steps(of.run)[-1] < STEPS
    return "auto"


def by_kills(of: Interrupted) -> str:
    return by_a_kill(of, times=4)


def by_an_older_checkpoint(of: Interrupted) -> str:
    copied(of.whole, of.run)
    return str(checkpoint_at(of.run, 18))


def by_another_folder(of: Interrupted) -> str:
    return str(checkpoint_at(of.whole, 18))


INTERRUPTIONS = [by_its_end, by_a_signal, by_a_kill, by_an_older_checkpoint, by_another_folder]


@pytest.mark.parametrize("interrupt", [*INTERRUPTIONS, pytest.param(by_kills, marks=pytest.mark.slow)])
def test_whatever_interrupts_a_run_it_resumes_exactly(
    tiny: Path,
    recipe_of: Recipes,
    whole: Path,
    tmp_path: Path,
    raise_at: Callable[[int, signal.Signals], None],
    interrupt: Callable[[Interrupted], str],
) -> None:
    run = tmp_path / "run"
    point = interrupt(Interrupted(tiny, recipe_of, whole, run, raise_at))
    train(recipe_of(*OPTIONS, f"training.steps={STEPS}"), run, resume=point)
    assert equal(run, whole) and logged_steps(whole)[-1] == STEPS, "the other run stays as it was"
    assert not list((run / "checkpoints").glob(".*"))
