"""Training as on a GPU, tested on a CPU: no step waits for a value, and what is fetched late is the same."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import pytest

from lmlong.attention.device_policy import GPU_POLICY
from lmlong.checkpoint import read
from lmlong.errors import DivergedError
from lmlong.recipe import Recipe
from lmlong.training.callbacks import TrainingCallback
from lmlong.training.module import TrainingModule
from lmlong.training.prepare import prepare_new_run
from lmlong.training.run import _fit, run
from lmlong.training.signals import StopOnSignal
from lmlong.training.start import Start

from .conftest import TABLES, Poison, Recipes, logged_steps, losses, metrics, same_tensors, weights
from .waits import count_waits

LONG = ("training.schedule=constant", "training.validate_every=100", "training.checkpoint_every=100")
ADAMW, SKIP = "training.optimizer=adamw", "training.on_nonfinite=skip"
EVERY_FOUR = "training.log_every=4"
FOUR = (*LONG, EVERY_FOUR, "training.kernel=torch", "training.steps=4")
CARRY = ("training.carry_state=true", "model.attention.kind=[delta, window]", "model.attention.window=20")


def on_gpu(recipe: Recipe, folder: Path, resume: str | None = None) -> Path:
    """Train as on a GPU."""
    run(recipe, folder, resume, policy=GPU_POLICY)
    return folder


STEPS: dict[str, Iterable[str]] = {
    "muon": [TABLES, "training.accumulate=2", "training.segment=16", "model.dropout=0.1"],
    "adamw": [ADAMW, "training.precision=bf16", "text.rows=documents"],
    "passed states, rounded weights": ["training.state_passing=0.5", "training.quantize=int4"],
    "carried states": CARRY,
    "encoder": ["objective=masked", "model.attention.kind=full"],
}


@pytest.mark.parametrize("options", STEPS.values(), ids=STEPS)
def test_no_step_waits(recipe_of: Recipes, tmp_path: Path, options: Iterable[str]) -> None:
    with count_waits() as waits:
        on_gpu(recipe_of(*FOUR, *options), tmp_path / "run")
    assert waits == {"fetch": 1}


def test_cpu_reads_in_each_step(recipe_of: Recipes, tmp_path: Path) -> None:
    """So the instrument is not blind."""
    with count_waits() as waits:
        run(recipe_of(*FOUR), tmp_path / "run")
    assert waits.pop("fetch") == 4
    assert any("module.py" in place for place in waits), "whether the gradient is finite"


@pytest.mark.parametrize("options", [[], pytest.param([ADAMW], marks=pytest.mark.slow)], ids=["muon", "adamw"])
def test_figures_fetched_late_are_the_same(
    recipe_of: Recipes, tmp_path: Path, poison: Poison, options: list[str]
) -> None:
    """Losses, a spike, a skipped step and validations; and about what a CPU computes."""
    for name, policy, every in (("late", GPU_POLICY, 5), ("at once", GPU_POLICY, 1), ("cpu", None, 1)):
        poison({2, 5, 8})
        run(recipe_of(SKIP, *options, f"training.log_every={every}"), tmp_path / name, policy=policy)
    late, at_once, cpu = (
        [{k: v for k, v in line.items() if k != "tokens_per_second"} for line in metrics(tmp_path / name)]
        for name in ("late", "at once", "cpu")
    )
    assert late == [line for line in at_once if "loss" not in line or line["step"] in (5, 10, 12)]
    assert [line["step"] for line in late if "event" in line] == [3, 6, 9]
    assert [list(line) for line in at_once] == [list(line) for line in cpu]
    finite = [[line["loss"] for line in lines if line.get("loss")] for lines in (at_once, cpu)]
    assert len(finite[0]) == 9 and finite[0] == pytest.approx(finite[1], rel=1e-4)
    assert same_tensors(weights(tmp_path / "late"), weights(tmp_path / "at once"))


def test_carried_state_is_reset_after_a_masked_step(recipe_of: Recipes, tmp_path: Path, poison: Poison) -> None:
    poison({3})
    on_gpu(recipe_of(SKIP, *CARRY, "training.steps=4", EVERY_FOUR), tmp_path / "run")
    state = read.read_training(read.find(tmp_path / "run"))
    *carried, position = (tensor for name, tensor in state.items() if name.startswith("carried."))
    empty = prepare_new_run(recipe_of(*CARRY)).model.init_state(4)
    assert state["skipped"] == 1 and not any(tensor.any() for tensor in (*carried, position))
    assert empty.position.shape == position.shape
    assert math.isfinite(losses(on_gpu(recipe_of(SKIP, *CARRY, "training.steps=5"), tmp_path / "run", "auto"))[-1])
    poison({3})
    run(recipe_of(SKIP, *CARRY, "training.steps=4"), tmp_path / "cpu")
    assert not any("carried" in name for name in read.read_training(read.find(tmp_path / "cpu"))), "as on a CPU, too"


@pytest.mark.parametrize(
    ("options", "bad", "message"),
    [
        ([], {5}, r"step 6: the loss of batch 5 is nan\. The weights are those of step 5"),
        (["training.on_nonfinite=skip", "training.skips=1"], {5, 6}, r"step 7: 2 steps in a row .* of step 6"),
        ([TABLES], {5}, r"step 6: the loss of batch 5 is nan"),
    ],
    ids=["stop", "skip", "stop, with tables"],
)
def test_late_stop_keeps_the_last_finite_weights(
    recipe_of: Recipes, tmp_path: Path, poison: Poison, options: list[str], bad: set[int], message: str
) -> None:
    """Steps after the first bad one are masked, though their gradients are finite."""
    train_five = recipe_of(*LONG, *options, "training.steps=5")
    expected = weights(on_gpu(train_five, tmp_path / "five"))
    prepared = prepare_new_run(recipe_of(*LONG, *options, "training.log_every=9"))
    module, signals = TrainingModule(prepared, GPU_POLICY), StopOnSignal()
    callback = TrainingCallback(tmp_path / "run", prepared, signals)
    (tmp_path / "run").mkdir()
    poison(bad)
    with pytest.raises(DivergedError, match=message):
        _fit(module, callback, signals, Start(callback, None, overwrite=False))
    assert module.step == 9, "when it was noticed"
    assert same_tensors(expected, module.model.state_dict())
    assert not list(tmp_path.glob("run/checkpoints/step-*"))


def test_no_checkpoint_is_saved_after_a_bad_step(recipe_of: Recipes, tmp_path: Path, poison: Poison) -> None:
    poison({5})
    with pytest.raises(DivergedError, match="step 6: "):
        on_gpu(recipe_of("training.log_every=100", "training.validate_every=100"), tmp_path / "run")
    assert read.find(tmp_path / "run").name == "step-00000004"


def test_signal_saves_the_step(recipe_of: Recipes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A single process has nobody to agree with, and stops at once."""
    take = TrainingModule.take_figures

    def take_with_signal(module: TrainingModule) -> object:
        if module.step == 6:
            signal.raise_signal(signal.SIGTERM)
        return take(module)

    monkeypatch.setattr(TrainingModule, "take_figures", take_with_signal)
    assert run(recipe_of(*LONG, EVERY_FOUR), tmp_path / "run", policy=GPU_POLICY).signal == signal.SIGTERM
    assert read.find(tmp_path / "run").name == "step-00000006"
    assert len(read.read_training(read.find(tmp_path / "run"))["recent"]) == 6
    assert logged_steps(tmp_path / "run") == [4]


TWO = """
import json, sys
from pathlib import Path

sys.path.insert(0, {tests!r})
from waits import count_waits

from lmlong.attention.device_policy import GPU_POLICY
from lmlong.recipe import file as recipe_file
from lmlong.training.run import run

with count_waits() as waits:
    result = run(recipe_file.load({recipe!r}, sys.argv[2:]), Path(sys.argv[1]), "auto", policy=GPU_POLICY)
Path(sys.argv[1], f"waits-{{result.is_main_process}}").write_text(json.dumps(waits))
sys.exit(128 + result.signal if result.signal else 0)
"""


@pytest.mark.slow
def test_two_processes_agree_only_at_fetches(tiny: Path, tmp_path: Path, recipe_of: Recipes) -> None:
    """A script of its own, since Lightning starts it again for the second process."""
    script, one, two = tmp_path / "two.py", tmp_path / "one", tmp_path / "two"
    script.write_text(TWO.format(tests=str(Path(__file__).parent), recipe=str(tiny)))
    options = (*LONG, EVERY_FOUR, "training.kernel=torch", "training.steps=40")
    command = [sys.executable, str(script), str(two), *options, "devices=2", "training.batch_size=2"]
    child = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    while not metrics(two) and child.poll() is None:
        time.sleep(0.002)
    os.killpg(child.pid, signal.SIGTERM)
    assert child.wait(60) == 143, child.stderr and child.stderr.read()
    step = int(read.find(two).name[5:])
    assert step % 4 == 0 and 0 < step < 40
    subprocess.run(command, check=True)
    assert losses(two) == pytest.approx(losses(on_gpu(recipe_of(*options), one)), rel=1e-4)
    assert logged_steps(two) == logged_steps(one) == list(range(4, 41, 4))
    times = (40 - step) // 4
    # a fetch is that of the figures and that of their sums over the ranks
    waits = {"fetch": 2 * times, "agree": times + 1, "clock": times, "Lightning": 40 - step}
    for rank in ("True", "False"):
        assert json.loads((two / f"waits-{rank}").read_text()) == waits
