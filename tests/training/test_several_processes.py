"""Several processes that train one model are the run of one, by every strategy, and stop, die and resume together.

The processes are real, since what they exchange and how they end is what is tested.
"""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from lmlong.checkpoint import read
from lmlong.training.loader import Loader
from lmlong.training.prepare import prepare_new_run
from lmlong.training.run import train

from .conftest import (
    Recipes,
    checkpoint_at,
    equal,
    lmlong,
    logged_steps,
    losses,
    metrics,
    train_in_processes,
    train_until,
    weights,
)

TWO, ONE = ("devices=2", "training.batch_size=2"), ("training.batch_size=4",)
LONG = "text.sequence_length=61"
PARTS = ("devices=2", "training.sequence_parallel=2", LONG, "training.batch_size=2")
WHOLE_ROWS = (LONG, "training.batch_size=2")
GROUPS = ("devices=4", "training.sequence_parallel=2", LONG, "training.batch_size=2")
ALL_ROWS = (LONG, "training.batch_size=4")
PIPED = "text.sources=[{kind: files, paths: ['-']}]"
TABLES = "model.ngram_embedding={rows: 512, width: 8}"
RUN = "RUN"
"""Stands for the run of a softmax model."""


class Case(NamedTuple):
    """How rows are shared out among processes, what one process has in place of that, and what is trained."""

    strategy: str
    several: tuple[str, ...]
    alone: tuple[str, ...]
    options: tuple[str, ...]
    error: float = 1e-4  # of losses


PASSED = ("training.state_passing=0.5", "model.attention.kind=[delta, window]", "model.attention.window=20")

USUAL = {"parts": Case("ddp", PARTS, WHOLE_ROWS, PASSED, 3e-5)}

SLOW: dict[str, Case] = {
    "tables in segments": Case(
        "ddp", TWO, ONE, (TABLES, "training.segment=16", "training.activation_checkpointing=true")
    ),
    "rounded": Case("ddp", TWO, ONE, ("training.quantize=int4", "training.accumulate=2"), 1e-3),
    "a teacher": Case("ddp", TWO, ONE, (f"training.teacher={RUN}", "training.teacher_share=0.9")),
    "layers of a teacher": Case(
        *("ddp", TWO, ONE),
        (f"training.teacher={RUN}", f"training.init_from={RUN}", "training.teacher_of=layers"),
        1e-3,
    ),
    "masked": Case("ddp", TWO, ONE, ("objective=masked", "model.attention.kind=full")),
    "stage 1": Case("stage 1", TWO, ONE, (TABLES, "training.accumulate=2", "training.quantize=int4"), 1e-3),
    "stage 2": Case("stage 2", TWO, ONE, (TABLES, "training.optimizer=adamw")),
    "stage 3": Case("stage 3", TWO, ONE, (TABLES, "training.segment=16", "training.activation_checkpointing=true")),
    "stage 3, rounded": Case("stage 3", TWO, ONE, ("training.quantize=int4", "training.accumulate=2"), 1e-3),
    "parts, carried": Case(
        "ddp", PARTS, WHOLE_ROWS, (TABLES, "training.carry_state=true", "training.activation_checkpointing=true")
    ),
    "parts, n-grams": Case(
        "ddp", PARTS, WHOLE_ROWS, ("model.attention.kind=[ngram, softmax]", "training.accumulate=2"), 3e-5
    ),
    "parts, resampled": Case(
        *("ddp", PARTS, WHOLE_ROWS),
        ("model.attention.feature_map=favor", "model.attention.favor.resample_every=3"),
        3e-5,
    ),
    "parts, stage 3": Case(
        *("stage 3", PARTS, WHOLE_ROWS),
        (TABLES, "model.attention.kind=[ngram, linear]", "model.attention.feature_map=hedgehog"),
    ),
    "parts, stage 3, softmax": Case(
        "stage 3", PARTS, WHOLE_ROWS, ("model.attention.kind=[softmax, delta]", "model.layers=3"), 3e-5
    ),
    "parts, stage 3, bfloat16": Case(
        "stage 3", PARTS, WHOLE_ROWS, ("training.precision=bf16", "model.attention.kind=[delta, linear]"), 5e-3
    ),
    "groups": Case(
        *("ddp", GROUPS, ALL_ROWS),
        (TABLES, "model.attention.kind=[delta, linear]", "training.state_passing=0.5", "training.optimizer=adamw"),
    ),
    "groups, stage 2": Case(
        *("stage 2", GROUPS, ALL_ROWS),
        ("model.attention.parallel_window=20", "training.carry_state=true", "training.optimizer=adamw"),
        3e-5,
    ),
    "groups, stage 3": Case(
        *("stage 3", GROUPS, ALL_ROWS),
        ("model.attention.feature_map=favor", "training.activation_checkpointing=true", "training.accumulate=2"),
        3e-5,
    ),
}


def by(strategy: str, folder: Path) -> tuple[str, ...]:
    """Options for ddp or a stage of DeepSpeed, with no weight too small to be divided."""
    if strategy == "ddp":
        return ()
    settings = folder / "settings.json"
    settings.write_text(json.dumps({"zero_optimization": {"stage3_param_persistence_threshold": 0}}))
    stage = (f"training.deepspeed.stage={strategy[-1]}", f"training.deepspeed.config={settings}")
    return "training.strategy=deepspeed", *stage


def validated(run: Path) -> list[tuple[int, int]]:
    """The tokens and bytes that each validation counts."""
    scores = [line["validation"] for line in metrics(run) if "validation" in line]
    return [(score["tokens"], score["bytes"]) for score in scores]


def norms(run: Path) -> list[float]:
    return [line["gradient_norm"] for line in metrics(run) if "loss" in line]


@pytest.mark.parametrize("name", [*USUAL, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_several_processes_are_one(tiny: Path, recipe_of: Recipes, softmax: Path, tmp_path: Path, name: str) -> None:
    """Two resume to the last bit, too; in gradients that more processes sum, the order of the sums may change."""
    case, several, one = (USUAL | SLOW)[name], tmp_path / "several", tmp_path / "one"
    options = ("training.steps=8", "training.schedule=constant", "training.keep_last=9")
    options += tuple(option.replace(RUN, str(softmax)) for option in case.options)
    divided = (*options, *case.several, *by(case.strategy, tmp_path))
    train_in_processes(tiny, several, *divided)
    train(recipe_of(*options, *case.alone), one)
    assert losses(several) == pytest.approx(losses(one), rel=case.error)
    assert validated(several) == validated(one)
    if "bfloat16" in name:
        assert losses(several) != pytest.approx(losses(one), rel=1e-7), "products are rounded"
        return  # so are gradients, whose norms may differ by a tenth
    assert norms(several) == pytest.approx(norms(one), rel=max(10 * case.error, 3e-5))
    for weight, expected in weights(one).items():
        assert float((weights(several)[weight] - expected).norm()) < 1e-2 * float(expected.norm()) + 1e-4, weight
    if TABLES in case.options:
        squares, truth = (read.read_training(read.find(run))["row_squares"] for run in (several, one))
        assert float((squares - truth).norm()) < 1e-3 * float(truth.norm())
    if name in SLOW and "devices=2" in case.several:
        train_in_processes(tiny, tmp_path / "again", *divided, "--resume", checkpoint_at(several, 4))
        assert equal(tmp_path / "again", several)


def test_two_processes_read_a_pipe_and_resume_after_a_signal(tiny: Path, tmp_path: Path, recipe_of: Recipes) -> None:
    """They stop together after a signal to one of them, and both need the text of the pipe."""
    two, one, options = tmp_path / "two", tmp_path / "one", (*TWO, "training.steps=40", "training.checkpoint_every=7")
    text = tiny.with_name("book.txt").open()
    with text, subprocess.Popen(["cat"], stdin=text, stdout=subprocess.PIPE) as pipe:
        child = train_until(1, tiny, two, *options, PIPED, stdin=pipe.stdout)
    errors = ended(child, signal.SIGTERM, two)
    assert errors.count("standard input: ") == 1
    train_in_processes(tiny, two, *options, "--resume", "auto")
    train(recipe_of("training.batch_size=4", "training.steps=40"), one)
    assert logged_steps(two) == logged_steps(one) == list(range(1, 41))
    assert losses(two) == pytest.approx(losses(one), rel=1e-4)
    assert validated(one)[-1] == validated(two)[-1]


def ended(child: subprocess.Popen, number: int, run: Path, to: Callable[[int, int], None] = os.kill) -> str:
    """End a run by a signal; its messages."""
    to(child.pid, number)
    output, errors = child.communicate(timeout=60)
    assert child.returncode == (143 if number == signal.SIGTERM else -number) and "Traceback" not in errors, errors
    assert output.count("stopped after step") == (number == signal.SIGTERM)
    assert 0 < logged_steps(run)[-1] < 60
    return errors


def to_the_second(first: int, number: int) -> None:
    """Signal the process that a run has started for its second device."""
    (second,) = Path(f"/proc/{first}/task/{first}/children").read_text().split()
    os.kill(int(second), number)


@pytest.mark.slow
@pytest.mark.parametrize("several", [TWO, (*TWO, "training.state_passing=0.5"), (*PARTS, "training.state_passing=0.5")])
def test_whatever_ends_processes_they_resume_exactly(tiny: Path, tmp_path: Path, several: tuple[str, ...]) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    options = (*several, "training.steps=60", "training.checkpoint_every=5")
    train_in_processes(tiny, whole, *options)
    for number, to in ((signal.SIGTERM, os.killpg), (signal.SIGTERM, to_the_second), (signal.SIGKILL, os.killpg)):
        ended(train_until(6, tiny, cut, *options), number, cut, to)
    train_in_processes(tiny, cut, *options, "--resume", "auto")
    assert equal(cut, whole)


@pytest.mark.slow
@pytest.mark.parametrize(
    "several", [TWO, (*TWO, "training.strategy=deepspeed"), PARTS], ids=["ddp", "stage 2", "parts"]
)
def test_the_run_ends_when_a_rank_is_killed(tiny: Path, tmp_path: Path, several: tuple[str, ...]) -> None:
    child = train_until(1, tiny, tmp_path / "run", *several, "training.steps=100000")
    to_the_second(child.pid, signal.SIGKILL)
    _, errors = child.communicate(timeout=60)
    assert child.returncode in (1, -signal.SIGKILL) and "Traceback" not in errors, errors
    # rank 0 notices it first, or the launcher, which kills rank 0
    assert "another process of the run has ended or does not respond" in errors or "terminated with code -9" in errors


@pytest.mark.slow
def test_a_killed_run_is_resumed_by_fewer_and_by_more(tiny: Path, recipe_of: Recipes, tmp_path: Path) -> None:
    options = (
        "training.steps=40",
        "training.state_passing=0.5",
        "training.checkpoint_every=10",
        "training.keep_last=9",
    )
    options, stage = (*options, "training.schedule=constant"), by("stage 2", tmp_path)
    run = tmp_path / "two"
    child = lmlong("train", tiny, *PARTS, *options, *stage, "--out", run, start_new_session=True)
    while not (checkpoint_at(run, 20) / "manifest.json").exists():
        time.sleep(0.01)
        assert child.poll() is None, child.communicate()
    os.killpg(child.pid, signal.SIGKILL)
    child.communicate(timeout=60)
    assert child.returncode == -signal.SIGKILL and max(logged_steps(run)) < 40
    middle = checkpoint_at(run, 20)
    train(recipe_of(*WHOLE_ROWS, *options), tmp_path / "one")
    train(recipe_of(*WHOLE_ROWS, *options), tmp_path / "fewer", resume=str(middle))
    four = ("devices=4", "training.sequence_parallel=4", *WHOLE_ROWS)
    train_in_processes(tiny, tmp_path / "more", *four, *options, *stage, "--resume", middle)
    for resumed in ("fewer", "more"):
        assert logged_steps(tmp_path / resumed) == list(range(1, 41))
        assert losses(tmp_path / resumed) == pytest.approx(losses(tmp_path / "one"), rel=1e-5)


POISONED = """
import math, os
from lmlong.attention.feature_maps import Elu
from lmlong.training import module

original, calls = module.loss_of_part, 0

def loss_of_part(*inputs, **options):
    global calls
    calls += 1
    loss, state = original(*inputs, **options)
    return loss * (math.nan if calls == 4 and os.environ.get("LOCAL_RANK") == "1" else 1.0), state

module.loss_of_part = loss_of_part

class Plain(Elu):
    def __init__(self, heads, head_dim, options=None):
        super().__init__(head_dim)

FEATURE_MAPS = {"plain": Plain}
"""


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "stage 2"])
def test_a_part_that_is_not_finite_is_a_step_skipped_by_all(tiny: Path, tmp_path: Path, strategy: str) -> None:
    (tmp_path / "poisoned.py").write_text(POISONED)
    options = ("training.on_nonfinite=skip", "training.state_passing=0.5", *by(strategy, tmp_path))
    plugin = (f"plugins=[{tmp_path / 'poisoned.py'}]", "model.attention.feature_map=plain")
    train_in_processes(tiny, tmp_path / "two", *PARTS, *options, *plugin)
    lines = metrics(tmp_path / "two")
    assert [(line["step"], line["event"]) for line in lines if "event" in line] == [
        (4, "skipped, its gradient was not finite (1 in a row)")
    ]
    assert [line["step"] for line in lines if "loss" in line and line["loss"] is None] == [4]


def test_each_target_is_counted_by_one_process(recipe_of: Recipes) -> None:
    """Losses and speeds are sums over all processes divided by these counts."""
    three = (*WHOLE_ROWS, "devices=3", "training.sequence_parallel=3")
    alone, divided = (prepare_new_run(recipe_of(*options)) for options in (WHOLE_ROWS, three))
    (whole,) = Loader(alone, range(1), rank=0)
    shares = [share for rank in range(3) for share in Loader(divided, range(1), rank)]
    assert all(torch.equal(share.tokens, whole.tokens) for share in shares)
    counts = [share.counts for share in shares]
    assert sum(counts[1:], counts[0]) == whole.counts
