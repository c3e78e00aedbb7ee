"""Numbers that are not finite never reach the weights, and a step without them is one that never was."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lmlong.checkpoint import read
from lmlong.errors import DivergedError
from lmlong.model.language_model import LanguageModel
from lmlong.recipe import Recipe
from lmlong.training.run import train

from .conftest import metrics

Recipes = Callable[..., Recipe]


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let the loss of some batches, counted from 0, be multiplied by something."""
    real, calls = LanguageModel.loss, [0]

    def plant(batches: set[int], factor: float = math.nan) -> None:
        calls[0] = 0

        def loss(self: LanguageModel, *inputs: Any) -> Any:
            nll, state = real(self, *inputs)
            calls[0] += 1
            return (nll * factor if calls[0] - 1 in batches else nll), state

        monkeypatch.setattr(LanguageModel, "loss", loss)

    return plant


def weights(run: Path) -> dict[str, torch.Tensor]:
    return read.read_weights(read.find(run))


def events(run: Path) -> list[tuple[int, str]]:
    return [(line["step"], line["event"]) for line in metrics(run) if "event" in line]


@pytest.mark.parametrize("factor", [math.nan, math.inf])
def test_a_step_that_is_not_finite_stops_the_run_by_its_name(
    recipe_of: Recipes, tmp_path: Path, poison: Callable, factor: float
) -> None:
    poison({5}, factor)
    with pytest.raises(DivergedError, match=rf"step 6: the loss of batch 5 is {factor}\. .* those of step 5"):
        train(recipe_of(), tmp_path / "run")
    assert read.find(tmp_path / "run").name == "step-00000004"
    assert all(tensor.isfinite().all() for tensor in weights(tmp_path / "run").values())


def test_a_step_left_out_changes_no_weight(recipe_of: Recipes, tmp_path: Path, poison: Callable) -> None:
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
    assert all(torch.equal(steps[0][name], steps[1][name]) for name in steps[0])
    assert not all(torch.equal(steps[1][name], steps[2][name]) for name in steps[0])
    moments = [read.read_training(tmp_path / "run" / "checkpoints" / f"step-{n:08d}")["optimizer"] for n in (4, 5)]
    kept = [{(k, name): moment for k, of in each.items() for name, moment in of.items()} for each in moments]
    assert kept[0].keys() == kept[1].keys() and {name for _, name in kept[0]} > {"momentum", "exp_avg"}
    assert all(torch.equal(moment, kept[1][place]) for place, moment in kept[0].items())
    assert [line["loss"] for line in metrics(tmp_path / "run") if line.get("step") == 5 and "loss" in line] == [None]


def test_so_many_in_a_row_and_no_more(recipe_of: Recipes, tmp_path: Path, poison: Callable) -> None:
    skip = ["training.on_nonfinite=skip", "training.skips=2"]
    poison({3, 4, 6, 7})
    assert train(recipe_of(*skip), tmp_path / "two").step == 12
    poison({3, 4, 5})
    with pytest.raises(DivergedError, match=r"step 6: 3 steps in a row"):
        train(recipe_of(*skip), tmp_path / "three")


def test_steps_left_out_are_counted_across_a_resume(recipe_of: Recipes, tmp_path: Path, poison: Callable) -> None:
    skip = ["training.on_nonfinite=skip", "training.skips=2"]
    poison({2, 3})
    train(recipe_of(*skip, "training.steps=4"), tmp_path / "run")
    poison({0})
    with pytest.raises(DivergedError, match=r"step 5: 3 steps in a row"):
        train(recipe_of(*skip), tmp_path / "run", resume="auto")


def test_a_spike_is_noted(recipe_of: Recipes, tmp_path: Path, poison: Callable) -> None:
    poison({7}, 3.0)
    train(recipe_of(), tmp_path / "run")
    ((step, event),) = events(tmp_path / "run")
    assert step == 8 and event.startswith("the loss is ")
    shown, usual = (float(word) for word in (event.split()[3], event.split()[-1]))
    losses = [line["loss"] for line in metrics(tmp_path / "run") if "loss" in line]
    assert shown == pytest.approx(losses[7], abs=1e-3)
    assert usual == pytest.approx((sorted(losses[:7])[3]), abs=1e-3)
