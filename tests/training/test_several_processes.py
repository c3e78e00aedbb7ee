"""Several processes that train one model are the run of one, by every strategy, and stop, die and resume together.

The processes are real, since what they exchange and how they end is what is tested.
"""

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from machine import new_cache

from lmlong.checkpoint import read
from lmlong.recipe import file as recipe_file
from lmlong.training.loader import Loader
from lmlong.training.prepare import prepare_new_run
from lmlong.training.run import train

from .conftest import (
    FROM_RUN,
    TABLES,
    TEACHER,
    Recipes,
    checkpoint_at,
    equal,
    logged_steps,
    losses,
    metrics,
    of_run,
    sharded,
    train_in_processes,
    train_until,
    weights,
)
from .test_launchers import succeed, tasks_of_slurm

TWO = ("devices=2", "training.batch_size=2")
LONG = "text.sequence_length=61"
PARTS = ("devices=2", "training.sequence_parallel=2", LONG, "training.batch_size=2")
WHOLE_ROWS = (LONG, "training.batch_size=2")
PIPED = "text.sources=[{kind: files, paths: ['-']}]"

BATCHES = (TWO, ("training.batch_size=4",))
ROWS = (PARTS, WHOLE_ROWS)
BOTH = (("devices=4", "training.sequence_parallel=2", LONG, "training.batch_size=2"), (LONG, "training.batch_size=4"))
"""What several processes share out, and what one process reads in place of that."""


class Case(NamedTuple):
    """The strategy, what is shared out, and what is trained."""

    strategy: str
    shared: tuple[tuple[str, ...], tuple[str, ...]]
    options: tuple[str, ...]
    error: float = 1e-4  # of losses


HALF, CARRY, INT4 = "training.state_passing=0.5", "training.carry_state=true", "training.quantize=int4"
TWICE, SEGMENT, RECOMPUTED = "training.accumulate=2", "training.segment=16", "training.activation_checkpointing=true"
FAVOR, HEDGEHOG = "model.attention.feature_map=favor", "model.attention.feature_map=hedgehog"
ADAMW, BF16 = "training.optimizer=adamw", "training.precision=bf16"

USUAL = Case("ddp", ROWS, (HALF, "model.attention.kind=[delta, window]", "model.attention.window=20"), 3e-5)

SLOW: dict[str, Case] = {
    "tables in segments": Case("ddp", BATCHES, (TABLES, SEGMENT, RECOMPUTED)),
    "rounded": Case("ddp", BATCHES, (INT4, TWICE), 1e-3),
    "a teacher": Case("ddp", BATCHES, (TEACHER, "training.teacher_share=0.9")),
    "layers of a teacher": Case("ddp", BATCHES, (TEACHER, FROM_RUN, "training.teacher_of=layers"), 1e-3),
    "masked": Case("ddp", BATCHES, ("objective=masked", "model.attention.kind=full")),
    "stage 1": Case("stage 1", BATCHES, (TABLES, TWICE, INT4), 1e-3),
    "stage 2": Case("stage 2", BATCHES, (TABLES, ADAMW)),
    "stage 3": Case("stage 3", BATCHES, (TABLES, SEGMENT, RECOMPUTED)),
    "stage 3, rounded": Case("stage 3", BATCHES, (INT4, TWICE), 1e-3),
    "parts, carried": Case("ddp", ROWS, (TABLES, CARRY, RECOMPUTED)),
    "parts, n-grams": Case("ddp", ROWS, ("model.attention.kind=[ngram, softmax]", TWICE), 3e-5),
    "parts, resampled": Case("ddp", ROWS, (FAVOR, "model.attention.favor.resample_every=3"), 3e-5),
    "parts, stage 3": Case("stage 3", ROWS, (TABLES, "model.attention.kind=[ngram, linear]", HEDGEHOG)),
    "parts, stage 3, softmax": Case("stage 3", ROWS, ("model.attention.kind=[softmax, delta]", "model.layers=3"), 3e-5),
    "parts, stage 3, bfloat16": Case("stage 3", ROWS, (BF16, "model.attention.kind=[delta, linear]"), 5e-3),
    "groups": Case("ddp", BOTH, (TABLES, "model.attention.kind=[delta, linear]", HALF, ADAMW)),
    "groups, stage 2": Case("stage 2", BOTH, ("model.attention.parallel_window=20", CARRY, ADAMW), 3e-5),
    "groups, stage 3": Case("stage 3", BOTH, (FAVOR, RECOMPUTED, TWICE), 3e-5),
}


def by(strategy: str, folder: Path) -> tuple[str, ...]:
    """Options for ddp or a stage of DeepSpeed."""
    return () if strategy == "ddp" else sharded(int(strategy[-1]), folder)


def validated(run: Path) -> list[tuple[int, int]]:
    """The tokens and bytes that each validation counts."""
    scores = [line["validation"] for line in metrics(run) if "validation" in line]
    return [(score["tokens"], score["bytes"]) for score in scores]


def norms(run: Path) -> list[float]:
    return [line["gradient_norm"] for line in metrics(run) if "loss" in line]


STEPS = ("training.steps=8", "training.schedule=constant", "training.keep_last=9")


def assert_same_run(
    several: Path, one: Path, error: float, norm_error: float | None = None, weight_error: float = 1e-2
) -> None:
    """Both runs are the same one, but for rounding."""
    assert losses(several) == pytest.approx(losses(one), rel=error)
    assert validated(several) == validated(one)
    if read.read_recipe(read.find(one)).training.precision == "bf16":
        return  # gradients are rounded, too, and their norms may differ by a tenth
    assert norms(several) == pytest.approx(norms(one), rel=norm_error or max(10 * error, 3e-5))
    found = weights(several)
    for weight, expected in weights(one).items():
        assert float((found[weight] - expected).norm()) < weight_error * float(expected.norm()) + 1e-4, weight
    squares, truth = (read.read_training(read.find(run))["row_squares"] for run in (several, one))
    assert (squares is None) == (truth is None)
    assert truth is None or float((squares - truth).norm()) < 1e-3 * float(truth.norm())


def test_two_slurm_tasks_are_one_process_and_tokenize_once(
    tiny: Path, recipe_of: Recipes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of the tasks makes the token files; the other waits for it, or comes later."""
    monkeypatch.setenv("LMLONG_CACHE", str(new_cache(tmp_path)))
    tokenizer = ("text.tokenizer.kind=sentencepiece", "text.tokenizer.vocabulary=300")
    several, alone = ((*STEPS, *tokenizer, *USUAL.options, *each) for each in USUAL.shared)
    outputs, _ = succeed(["lmlong", "train", tiny, *several, "--out", tmp_path / "two"], tasks_of_slurm())
    assert [output.count("validation ") for output in outputs] == [1, 0]
    assert len(list((tmp_path / "cache" / "tokens").iterdir())) == 1
    train(recipe_of(*alone), tmp_path / "one")
    assert_same_run(tmp_path / "two", tmp_path / "one", USUAL.error)


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_several_processes_are_one(tiny: Path, recipe_of: Recipes, softmax: Path, tmp_path: Path, name: str) -> None:
    """Two resume to the last bit, too; in gradients that more processes sum, the order of the sums may change."""
    case, several, one = SLOW[name], tmp_path / "several", tmp_path / "one"
    options = (*STEPS, *of_run(case.options, softmax))
    divided = (*options, *case.shared[0], *by(case.strategy, tmp_path))
    train_in_processes(tiny, several, *divided)
    train(recipe_of(*options, *case.shared[1]), one)
    assert_same_run(several, one, case.error)
    if BF16 in case.options:
        assert losses(several) != pytest.approx(losses(one), rel=1e-7), "products are rounded"
    if "devices=2" in divided:
        train_in_processes(tiny, tmp_path / "again", *divided, "--resume", checkpoint_at(several, 4))
        assert equal(tmp_path / "again", several)


def test_two_processes_read_a_pipe_and_one_resumes(tiny: Path, tmp_path: Path, recipe_of: Recipes) -> None:
    """They stop together after a signal to one of them, and both need the text of the pipe."""
    two, one, steps = tmp_path / "two", tmp_path / "one", "training.steps=40"
    text = tiny.with_name("book.txt").open()
    with text, subprocess.Popen(["cat"], stdin=text, stdout=subprocess.PIPE) as pipe:
        child = train_until(1, tiny, two, *TWO, steps, PIPED, stdin=pipe.stdout)
    errors = ended(child, signal.SIGTERM, two)
    assert errors.count("standard input: ") == 1
    train(recipe_file.load(two / "recipe.yaml", ["devices=1"]), two, resume="auto")
    train(recipe_of(*BATCHES[1], steps), one)
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
@pytest.mark.parametrize("several", [TWO, (*TWO, HALF), (*PARTS, HALF)])
def test_interrupted_processes_resume_exactly(tiny: Path, tmp_path: Path, several: tuple[str, ...]) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    options = (*several, "training.steps=60", "training.checkpoint_every=5")
    train_in_processes(tiny, whole, *options)
    for number, to in ((signal.SIGTERM, os.killpg), (signal.SIGTERM, to_the_second), (signal.SIGKILL, os.killpg)):
        ended(train_until(6, tiny, cut, *options), number, cut, to)
    train_in_processes(tiny, cut, *options, "--resume", "auto")
    assert equal(cut, whole)


@pytest.mark.slow
def test_killed_run_is_resumed_by_fewer_and_by_more_processes(tiny: Path, recipe_of: Recipes, tmp_path: Path) -> None:
    steps = ("training.steps=40", "training.checkpoint_every=10", "training.keep_last=9")
    options, stage = (*steps, HALF, "training.schedule=constant"), by("stage 2", tmp_path)
    run = tmp_path / "two"
    child, middle = train_until(1, tiny, run, *PARTS, *options, *stage), checkpoint_at(run, 20)
    while not (middle / "manifest.json").exists():
        time.sleep(0.01)
        assert child.poll() is None, child.communicate()
    os.killpg(child.pid, signal.SIGKILL)
    child.communicate(timeout=60)
    assert child.returncode == -signal.SIGKILL and max(logged_steps(run)) < 40
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
def test_nonfinite_part_is_skipped_by_all_processes(tiny: Path, tmp_path: Path, strategy: str) -> None:
    (tmp_path / "poisoned.py").write_text(POISONED)
    options = ("training.on_nonfinite=skip", "training.state_passing=0.5", *by(strategy, tmp_path))
    plugin = (f"plugins=[{tmp_path / 'poisoned.py'}]", "model.attention.feature_map=plain")
    train_in_processes(tiny, tmp_path / "two", *PARTS, *options, *plugin)
    lines = metrics(tmp_path / "two")
    assert [(line["step"], line["event"]) for line in lines if "event" in line] == [
        (4, "skipped, its gradient was not finite (1 in a row)")
    ]
    assert [line["step"] for line in lines if "loss" in line and line["loss"] is None] == [4]


def test_each_target_is_counted_once(recipe_of: Recipes) -> None:
    """Losses and speeds are sums over all processes divided by these counts."""
    three = (*WHOLE_ROWS, "devices=3", "training.sequence_parallel=3")
    alone, divided = (prepare_new_run(recipe_of(*options)) for options in (WHOLE_ROWS, three))
    (whole,) = Loader(alone, range(1), rank=0)
    shares = [share for rank in range(3) for share in Loader(divided, range(1), rank)]
    assert all(torch.equal(share.tokens, whole.tokens) for share in shares)
    counts = [share.counts for share in shares]
    assert sum(counts[1:], counts[0]) == whole.counts
