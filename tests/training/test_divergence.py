"""Numbers that are not finite never reach the weights, and a step without them is one that never was."""

import math
from pathlib import Path

import pytest
import torch

from lmlong.attention.device_policy import GPU_POLICY, DevicePolicy
from lmlong.checkpoint import read
from lmlong.errors import DivergedError
from lmlong.training.prepare import prepare_new_run
from lmlong.training.run import run, train

from .conftest import TABLES, Poison, Recipes, checkpoint_at, losses, metrics, moments, same_tensors, sharded, weights


def events(run: Path) -> list[tuple[int, str]]:
    return [(line["step"], line["event"]) for line in metrics(run) if "event" in line]


@pytest.mark.parametrize("factor", [math.nan, math.inf])
def test_nonfinite_step_stops_the_run(recipe_of: Recipes, tmp_path: Path, poison: Poison, factor: float) -> None:
    poison({5}, factor)
    with pytest.raises(DivergedError, match=rf"step 6: the loss of batch 5 is {factor}\. .* those of step 5"):
        train(recipe_of(), tmp_path / "run")
    assert read.find(tmp_path / "run").name == "step-00000004"
    assert all(tensor.isfinite().all() for tensor in weights(tmp_path / "run").values())


ADAMW, SKIP = "training.optimizer=adamw", "training.on_nonfinite=skip"

SKIPPED: dict[str, tuple[DevicePolicy | None, list[str], int | None]] = {
    "tables": (None, [TABLES], None),
    "muon as on a GPU": (GPU_POLICY, [], None),
    "adamw as on a GPU": (GPU_POLICY, [ADAMW], None),
    "stage 2": (None, [], 2),
    "stage 3": (None, [ADAMW], 3),
}
"""By what policy, what and by what stage of DeepSpeed is trained."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name == "stage 2")) for name in SKIPPED]
)
def test_skipped_step_changes_nothing(recipe_of: Recipes, tmp_path: Path, poison: Poison, name: str) -> None:
    """The first step, before there are moments, and the fifth, of which one of two batches is bad."""
    policy, options, stage = SKIPPED[name]
    often = ["training.accumulate=2", "training.checkpoint_every=1", "training.keep_last=20", "training.steps=6"]
    poison({1, 9})
    divided = sharded(stage, tmp_path) if stage else ()
    run(recipe_of(SKIP, *often, *options, *divided), tmp_path / "run", policy=policy)
    assert events(tmp_path / "run") == [(n, "skipped, its gradient was not finite (1 in a row)") for n in (1, 5)]
    assert losses(tmp_path / "run")[4] is None
    first, fourth, fifth, sixth = (checkpoint_at(tmp_path / "run", n) for n in (1, 4, 5, 6))
    assert same_tensors(read.read_weights(first), prepare_new_run(recipe_of(*options)).model.state_dict())
    assert not any(moment.any() for moment in moments(first).values())
    for tensors in (read.read_weights, moments):
        before, skipped, after = map(tensors, (fourth, fifth, sixth))
        assert same_tensors(before, skipped) and not any((after[name] == x).all() for name, x in skipped.items())
    assert {name.rpartition(".")[2] for name in moments(fourth)} > {"exp_avg"}
    if TABLES in options:
        squares = [read.read_training(checkpoint)["row_squares"] for checkpoint in (fourth, fifth, sixth)]
        assert torch.equal(*squares[:2]) and not torch.equal(*squares[1:])


def test_too_many_skipped_steps_stop_the_run(
    recipe_of: Recipes, tmp_path: Path, poison: Poison, capsys: pytest.CaptureFixture[str]
) -> None:
    skip = [SKIP, "training.skips=2"]
    poison({3, 4, 6, 10})
    assert train(recipe_of(*skip), tmp_path / "two").step == 12
    (shown,) = (line for line in capsys.readouterr().err.splitlines() if line.startswith("step 12/12: loss "))
    assert math.isfinite(float(shown.split()[3].strip(","))), "of steps that were not skipped"
    poison({3, 4, 5})
    with pytest.raises(DivergedError, match=r"step 6: 3 steps in a row"):
        train(recipe_of(*skip), tmp_path / "three")


def test_skipped_steps_are_counted_across_a_resume(recipe_of: Recipes, tmp_path: Path, poison: Poison) -> None:
    skip = [SKIP, "training.skips=2"]
    poison({2, 3})
    train(recipe_of(*skip, "training.steps=4"), tmp_path / "run")
    poison({0})
    with pytest.raises(DivergedError, match=r"step 5: 3 steps in a row"):
        train(recipe_of(*skip), tmp_path / "run", resume="auto")


def test_spike_is_logged(recipe_of: Recipes, tmp_path: Path, poison: Poison) -> None:
    poison({7}, 3.0)
    train(recipe_of(), tmp_path / "run")
    ((step, event),) = events(tmp_path / "run")
    assert step == 8 and event.startswith("the loss is ")
    shown, usual = (float(word) for word in (event.split()[3], event.split()[-1]))
    logged = losses(tmp_path / "run")
    assert shown == pytest.approx(logged[7], abs=1e-3)
    assert usual == pytest.approx((sorted(logged[:7])[3]), abs=1e-3)
