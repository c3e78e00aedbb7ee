"""Numbers that are not finite never reach the weights, and a step without them is one that never was."""

import math
from pathlib import Path

import pytest

from lmlong.checkpoint import read
from lmlong.errors import DivergedError
from lmlong.training.run import train

from .conftest import Poison, Recipes, losses, metrics, moments, same_tensors, weights


def events(run: Path) -> list[tuple[int, str]]:
    return [(line["step"], line["event"]) for line in metrics(run) if "event" in line]


@pytest.mark.parametrize("factor", [math.nan, math.inf])
def test_a_step_that_is_not_finite_stops_the_run_by_its_name(
    recipe_of: Recipes, tmp_path: Path, poison: Poison, factor: float
) -> None:
    poison({5}, factor)
    with pytest.raises(DivergedError, match=rf"step 6: the loss of batch 5 is {factor}\. .* those of step 5"):
        train(recipe_of(), tmp_path / "run")
    assert read.find(tmp_path / "run").name == "step-00000004"
    assert all(tensor.isfinite().all() for tensor in weights(tmp_path / "run").values())


def test_a_step_left_out_changes_no_weight(recipe_of: Recipes, tmp_path: Path, poison: Poison) -> None:
    """Of two accumulated batches one is bad: the whole step is left out, and the optimizer's memory of it too."""
    skip = [
        "training.on_nonfinite=skip",
        "training.accumulate=2",
        "training.checkpoint_every=1",
        "training.keep_last=20",
    ]
    poison({9})
    train(recipe_of(*skip), tmp_path / "run")
    assert events(tmp_path / "run") == [(5, "skipped, its gradient was not finite (1 in a row)")]
    steps = [read.read_weights(tmp_path / "run" / "checkpoints" / f"step-{n:08d}") for n in (4, 5, 6)]
    assert same_tensors(steps[0], steps[1]) and not same_tensors(steps[1], steps[2])
    kept = [moments(tmp_path / "run" / "checkpoints" / f"step-{n:08d}") for n in (4, 5)]
    assert same_tensors(*kept) and {name.rpartition(".")[2] for name in kept[0]} > {"momentum", "exp_avg"}
    assert losses(tmp_path / "run")[4] is None


def test_more_skipped_steps_in_a_row_than_allowed_stop_the_run(
    recipe_of: Recipes, tmp_path: Path, poison: Poison
) -> None:
    skip = ["training.on_nonfinite=skip", "training.skips=2"]
    poison({3, 4, 6, 7})
    assert train(recipe_of(*skip), tmp_path / "two").step == 12
    poison({3, 4, 5})
    with pytest.raises(DivergedError, match=r"step 6: 3 steps in a row"):
        train(recipe_of(*skip), tmp_path / "three")


def test_steps_left_out_are_counted_across_a_resume(recipe_of: Recipes, tmp_path: Path, poison: Poison) -> None:
    skip = ["training.on_nonfinite=skip", "training.skips=2"]
    poison({2, 3})
    train(recipe_of(*skip, "training.steps=4"), tmp_path / "run")
    poison({0})
    with pytest.raises(DivergedError, match=r"step 5: 3 steps in a row"):
        train(recipe_of(*skip), tmp_path / "run", resume="auto")


def test_a_spike_is_noted(recipe_of: Recipes, tmp_path: Path, poison: Poison) -> None:
    poison({7}, 3.0)
    train(recipe_of(), tmp_path / "run")
    ((step, event),) = events(tmp_path / "run")
    assert step == 8 and event.startswith("the loss is ")
    shown, usual = (float(word) for word in (event.split()[3], event.split()[-1]))
    logged = losses(tmp_path / "run")
    assert shown == pytest.approx(logged[7], abs=1e-3)
    assert usual == pytest.approx((sorted(logged[:7])[3]), abs=1e-3)
