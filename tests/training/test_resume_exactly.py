"""An interrupted run ends as the run that was not interrupted, to the last bit: interruptions by what is trained."""

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

from .conftest import (
    FROM_RUN,
    LAYERS_OF_A_TEACHER,
    SOFTMAX,
    TABLES,
    TEACHER,
    Recipes,
    checkpoint_at,
    copied,
    logged_steps,
    metrics,
    of_run,
    train_until,
    weights,
)

OFTEN = ("training.checkpoint_every=1", "training.keep_last=12")
DROPOUT = ["model.dropout=0.2", "training.accumulate=2", "training.batch_size=2"]
BLOCKS = "model.downsample={factor: 4, layers: 1}"
CARRY, PASS = "training.carry_state=true", "training.state_passing=0.5"
SEGMENTS = ["training.accumulate=2", "training.segment=16"]
MASKED = ["objective=masked", *DROPOUT, "model.attention.linformer.projected=8"]
HOURGLASS = "model.downsample={factor: 7, kind: conv, layers: 1}"


class Interrupted(NamedTuple):
    """What an interruption has to do with."""

    tiny: Path
    options: list[str]
    recipe_of: Recipes
    whole: Path
    run: Path
    raise_at: Callable[[int, signal.Signals], None]


def ended(of: Interrupted) -> list[Path | str]:
    """It ends by itself, and is given more steps."""
    train(of.recipe_of(*of.options, "training.steps=5"), of.run)
    return ["auto"]


def signalled(of: Interrupted) -> list[Path | str]:
    handlers = signal.getsignal(signal.SIGHUP), signal.getsignal(signal.SIGTERM)
    of.raise_at(5, signal.SIGHUP)
    with pytest.raises(SystemExit) as stopped:
        train(of.recipe_of(*of.options), of.run)
    assert stopped.value.args == (128 + signal.SIGHUP,) and read.find(of.run).name == "step-00000005"
    assert (signal.getsignal(signal.SIGHUP), signal.getsignal(signal.SIGTERM)) == handlers
    return ["auto"]


def killed(of: Interrupted) -> list[Path | str]:
    """A process, since it is killed."""
    child = train_until(4, of.tiny, of.run, *of.options)
    child.kill()
    child.communicate()
    assert child.returncode == -signal.SIGKILL and logged_steps(of.run)[-1] < 40
    return ["auto"]


def gone_back(of: Interrupted) -> list[Path | str]:
    copied(of.whole, of.run)
    return [checkpoint_at(of.run, 5)]


def rounded(of: Interrupted) -> list[Path | str]:
    """After, at and before the first step that rounds weights, step 10 of 12."""
    copied(of.whole, of.run)
    return [checkpoint_at(of.run, step) for step in (11, 9, 8)]


def from_another_folder(of: Interrupted) -> list[Path | str]:
    return [checkpoint_at(of.whole, 5)]


LINFORMER, FAVOR = "model.attention.kind=linformer", "model.attention.feature_map=favor"
RESAMPLED = [FAVOR, "model.attention.favor.resample_every=3"]
CONSTANT = ["training.schedule=constant", "training.validate_every=5"]
INT4 = "training.quantize=int4"
WINDOW = "model.attention.window=20"

STRATEGIES: dict[str, tuple[Callable[[Interrupted], list[Path | str]], list[str]]] = {
    "dropout, resampled features": (killed, [*DROPOUT, *RESAMPLED, "training.steps=40", "training.checkpoint_every=3"]),
    "AdamW, tables, rounded weights": (rounded, ["training.optimizer=adamw", TABLES, INT4]),
    "rounded weights, passed states": (rounded, ["training.precision=bf16", PASS, "training.quantize=int8"]),
    "carried states in segments": (
        signalled,
        [CARRY, *SEGMENTS, "training.precision=bf16", "model.attention.kind=[delta, window]", WINDOW],
    ),
    "carried states in blocks": (from_another_folder, [CARRY, BLOCKS, "training.segment=18"]),
    "passed states in blocks": (ended, [PASS, BLOCKS, TABLES, *CONSTANT]),
    "a teacher": (
        from_another_folder,
        [TEACHER, "training.segment=16", "training.teacher_temperature=2"],
    ),
    "layers of a teacher": (
        gone_back,
        [*LAYERS_OF_A_TEACHER],
    ),
    "added heads alone": (
        signalled,
        [
            *(*SOFTMAX, FROM_RUN, "training.only_ngram=true"),
            *("model.add_ngram=[1]", "model.attention.ngram.buckets=64"),
        ],
    ),
    "masked, slots": (gone_back, [*MASKED, LINFORMER, "model.attention.linformer.sharing=layerwise"]),
    "masked, resampled, in blocks": (ended, [*MASKED, *RESAMPLED, HOURGLASS, *CONSTANT]),
}

SLOW: dict[str, tuple[Callable[[Interrupted], list[Path | str]], list[str]]] = {
    "rounded weights in segments": (rounded, [*SEGMENTS, "model.dropout=0.1", INT4]),
    "passed states in segments": (
        gone_back,
        [PASS, *SEGMENTS, "training.optimizer=adamw", TABLES, "model.attention.kind=[ngram, window]", WINDOW],
    ),
    "masked, full": (killed, [*MASKED, "model.attention.kind=full", "training.steps=40"]),
    "masked, efficient": (signalled, [*MASKED, "model.attention.kind=efficient"]),
    "masked, convolved slots": (gone_back, [*MASKED, LINFORMER, "model.attention.linformer.projection=conv"]),
    "masked, a pattern in blocks": (
        from_another_folder,
        [*MASKED, "model.attention.kind=[linformer, full]", HOURGLASS],
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


@pytest.mark.parametrize("name", [*STRATEGIES, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_interrupted_run_resumes_exactly(
    tiny: Path,
    recipe_of: Recipes,
    softmax: Path,
    tmp_path: Path,
    raise_at: Callable[[int, signal.Signals], None],
    name: str,
) -> None:
    interrupt, options = (STRATEGIES | SLOW)[name]
    options = [*OFTEN, *of_run(options, softmax)]
    run, whole = tmp_path / "run", tmp_path / "whole"
    train(recipe_of(*options), whole)
    expected = Outcome.of(whole)
    for point in interrupt(Interrupted(tiny, options, recipe_of, whole, run, raise_at)):
        train(recipe_of(*options), run, resume=str(point))
        Outcome.of(run).assert_same(expected)
    assert not list((run / "checkpoints").glob(".*"))
    Outcome.of(whole).assert_same(expected)


@pytest.mark.parametrize("options", [[], ["training.optimizer=adamw", PASS]], ids=["muon", "adamw"])
def test_gpu_run_resumes_exactly_and_from_a_cpu_checkpoint(
    recipe_of: Recipes, tmp_path: Path, options: list[str]
) -> None:
    """On a CPU the optimizer counts its steps elsewhere."""
    recipe = recipe_of(*OFTEN, *options)
    train(recipe, tmp_path / "cpu")
    on_cpu = checkpoint_at(tmp_path / "cpu", 5)
    for folder, point in (("whole", None), ("whole", checkpoint_at(tmp_path / "whole", 5)), ("mixed", on_cpu)):
        before = Outcome.of(tmp_path / folder) if point and folder == "whole" else None
        training.run(recipe, tmp_path / folder, point, policy=GPU_POLICY)
        if before:
            Outcome.of(tmp_path / folder).assert_same(before)
    nats = [[line["loss"] for line in metrics(tmp_path / name) if "loss" in line] for name in ("whole", "mixed")]
    assert nats[0] == pytest.approx(nats[1], rel=1e-4)
