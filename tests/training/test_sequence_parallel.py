"""A run whose rows are read in parts by several processes is the same as one of a single process."""

import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lmlong.attention.plugins import load_plugin, unload_plugin
from lmlong.errors import RecipeError, UsageError
from lmlong.model.metrics import LossTotals
from lmlong.training.loader import Loader
from lmlong.training.prepare import prepare_new_run
from lmlong.training.run import train

from .conftest import Recipes, equal, lmlong, logged_steps, losses, metrics, train_in_processes, weights
from .test_launchers import succeed

ROWS = ("text.sequence_length=61", "training.batch_size=2", "training.steps=8", "training.schedule=constant")


def parts(number: int, *options: str) -> tuple[str, ...]:
    return *ROWS, f"devices={number}", f"training.sequence_parallel={number}", *options


def figures(run: Path) -> list[list[float]]:
    """What a run reports: losses, norms of gradients, and validations with the tokens that they count."""
    steps = [[line["loss"], line["gradient_norm"], line["learning_rate"]] for line in metrics(run) if "loss" in line]
    scores = [line["validation"] for line in metrics(run) if "validation" in line]
    return [*steps, *([score["nats"], score["tokens"], score["bytes"]] for score in scores)]


def by(strategy: str, folder: Path) -> tuple[str, ...]:
    """Options for ddp or a stage of DeepSpeed, with no weight too small to be divided."""
    if strategy == "ddp":
        return ()
    settings = folder / "settings.json"
    settings.write_text(json.dumps({"zero_optimization": {"stage3_param_persistence_threshold": 0}}))
    stage = (f"training.deepspeed.stage={strategy[-1]}", f"training.deepspeed.config={settings}")
    return "training.strategy=deepspeed", *stage


def second_of(child: subprocess.Popen) -> int:
    """The process that a run has started for its second device."""
    (second,) = Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text().split()
    return int(second)


def assert_near(some: Path, other: Path) -> None:
    """Compare weights, which Adam's first steps move by the signs of gradients."""
    mine = weights(some)
    for name, truth in weights(other).items():
        assert float((mine[name] - truth).norm()) < 2e-3 * float(truth.norm()) + 1e-4, name


def assert_same(some: Path, other: Path, rel: float = 3e-5) -> None:
    for got, expected in zip(figures(some), figures(other), strict=True):
        assert got == pytest.approx(expected, rel=rel)


@pytest.mark.parametrize(
    "options",
    [
        ["training.state_passing=0.5", "model.attention.kind=[delta, window]", "model.attention.window=20"],
        pytest.param(["training.carry_state=true", "training.activation_checkpointing=true"], marks=pytest.mark.slow),
        pytest.param(["model.attention.kind=[ngram, softmax]", "training.accumulate=2"], marks=pytest.mark.slow),
        pytest.param(["training.strategy=deepspeed", "training.deepspeed.stage=3"], marks=pytest.mark.slow),
        pytest.param(
            ["model.attention.feature_map=favor", "model.attention.favor.resample_every=3"], marks=pytest.mark.slow
        ),
    ],
    ids=["states passed", "states carried", "n-grams", "stage 3", "resampled"],
)
def test_two_processes_are_one(tiny: Path, recipe_of: Recipes, tmp_path: Path, options: list[str]) -> None:
    train_in_processes(tiny, tmp_path / "two", *parts(2, *options))
    alone = [option for option in options if "deepspeed" not in option]
    train(recipe_of(*ROWS, *alone), tmp_path / "one")
    assert_same(tmp_path / "two", tmp_path / "one")


@pytest.mark.slow
def test_a_killed_run_is_resumed_by_fewer_and_by_more(tiny: Path, recipe_of: Recipes, tmp_path: Path) -> None:
    options = ("training.steps=40", "training.state_passing=0.5", "training.checkpoint_every=10")
    deepspeed = ("training.strategy=deepspeed", "training.deepspeed.stage=2")
    run = tmp_path / "two"
    child = lmlong("train", tiny, *parts(2, *options, *deepspeed), "--out", run, start_new_session=True)
    while not (run / "checkpoints" / "step-00000020" / "manifest.json").exists() and child.poll() is None:
        time.sleep(0.01)
    os.killpg(child.pid, signal.SIGKILL)
    child.communicate(timeout=60)
    assert child.returncode == -signal.SIGKILL and max(logged_steps(run)) < 40
    middle = run / "checkpoints" / "step-00000020"
    train(recipe_of(*ROWS, *options), tmp_path / "one")
    train(recipe_of(*ROWS, *options), tmp_path / "fewer", resume=str(middle))
    train_in_processes(tiny, tmp_path / "more", *parts(4, *options, *deepspeed), "--resume", middle)
    assert logged_steps(tmp_path / "more") == logged_steps(tmp_path / "one") == list(range(1, 41))
    for resumed in ("fewer", "more"):
        assert losses(tmp_path / resumed) == pytest.approx(losses(tmp_path / "one"), rel=1e-5)


GROUPS = {
    "ddp": ["model.attention.kind=[delta, linear]", "training.state_passing=0.5", "training.optimizer=adamw"],
    "stage 1": ["model.attention.kind=[ngram, softmax]"],
    "stage 2": ["model.attention.parallel_window=20", "training.carry_state=true", "training.optimizer=adamw"],
    "stage 3": ["model.attention.feature_map=favor", "training.activation_checkpointing=true"],
}


@pytest.mark.slow
@pytest.mark.parametrize("strategy", GROUPS)
def test_two_groups_of_two_processes_are_one(tiny: Path, recipe_of: Recipes, tmp_path: Path, strategy: str) -> None:
    """Each group reads rows of its own."""
    options = ("training.accumulate=2", *GROUPS[strategy])
    groups = ("devices=4", "training.sequence_parallel=2", *by(strategy, tmp_path))
    train_in_processes(tiny, tmp_path / "four", *ROWS, *options, *groups)
    train(recipe_of(*ROWS, *options, "training.batch_size=4"), tmp_path / "one")
    assert_same(tmp_path / "four", tmp_path / "one")
    assert_near(tmp_path / "four", tmp_path / "one")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ngram", "[softmax, window]", "delta"])
def test_weights_that_come_and_go_are_there_for_effects(
    tiny: Path, recipe_of: Recipes, tmp_path: Path, kind: str
) -> None:
    """DeepSpeed's stage 3 gathers weights for the module that they belong to."""
    options = (f"model.attention.kind={kind}", "model.attention.feature_map=hedgehog")
    train_in_processes(tiny, tmp_path / "two", *parts(2, *options, *by("stage 3", tmp_path)))
    train(recipe_of(*ROWS, *options), tmp_path / "one")
    assert_same(tmp_path / "two", tmp_path / "one")


@pytest.mark.slow
def test_documents_shorter_than_rows_are_read_in_parts(tiny: Path, recipe_of: Recipes, tmp_path: Path) -> None:
    """Batches have different lengths."""
    draw, book = random.Random(1), (tmp_path / "book.txt").read_text()
    (tmp_path / "books").mkdir()
    for number in range(40):
        begin = draw.randrange(len(book) // 2)
        (tmp_path / "books" / f"{number}.txt").write_text(book[begin : begin + draw.choice([1, 35, 50, 130])])
    options = [
        *("text.rows=documents", f"text.sources.0.paths=[{tmp_path / 'books'}]"),
        *("text.validation.fraction=0.2", "training.steps=12", "training.batch_size=1"),
    ]
    train_in_processes(tiny, tmp_path / "three", *parts(3, *options))
    train(recipe_of(*ROWS, *options), tmp_path / "one")
    assert_same(tmp_path / "three", tmp_path / "one", rel=1e-4)  # steps of one short row amplify rounding


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "stage 3"])
def test_in_bfloat16_parts_round_like_rows(tiny: Path, recipe_of: Recipes, tmp_path: Path, strategy: str) -> None:
    options = ("training.precision=bf16", "model.attention.kind=[delta, linear]")
    train_in_processes(tiny, tmp_path / "two", *parts(2, *options, *by(strategy, tmp_path)))
    train(recipe_of(*ROWS, *options), tmp_path / "one")
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=5e-3)
    assert losses(tmp_path / "two") != pytest.approx(losses(tmp_path / "one"), rel=1e-7)


POISONED = """
import math, os
from lmlong.attention.feature_maps import Elu
from lmlong.training import module

original, calls = module.loss_of_part, 0

def loss_of_part(*inputs):
    global calls
    calls += 1
    loss, state = original(*inputs)
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
    train_in_processes(tiny, tmp_path / "two", *parts(2, *options, *plugin))
    lines = metrics(tmp_path / "two")
    assert [(line["step"], line["event"]) for line in lines if "event" in line] == [
        (4, "skipped, its gradient was not finite (1 in a row)")
    ]
    assert [line["step"] for line in lines if "loss" in line and line["loss"] is None] == [4]


@pytest.mark.slow
def test_a_signal_to_one_process_stops_and_saves_all(tiny: Path, tmp_path: Path) -> None:
    """The run is then killed, all processes of it at once, and resumed to the same bit."""
    options = parts(2, "training.steps=60", "training.state_passing=0.5", "training.checkpoint_every=5")
    train_in_processes(tiny, tmp_path / "whole", *options)
    cut, endings = tmp_path / "cut", {signal.SIGTERM: 143, signal.SIGKILL: -signal.SIGKILL}
    for number, status in endings.items():
        child = lmlong("train", tiny, *options, "--out", cut, "--resume", "auto", start_new_session=True)
        before = len(metrics(cut))
        while len(metrics(cut)) < before + 8 and child.poll() is None:
            time.sleep(0.002)
        if number == signal.SIGTERM:
            os.kill(second_of(child), number)
        else:
            os.killpg(child.pid, number)
        output, errors = child.communicate(timeout=60)
        assert child.returncode == status and "Traceback" not in errors, errors
        assert output.count("stopped after step") == (number == signal.SIGTERM)
        assert 0 < max(logged_steps(cut)) < 60
    train_in_processes(tiny, cut, *options, "--resume", "auto")
    assert equal(cut, tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "stage 3"])
def test_a_process_that_is_killed_is_named(tiny: Path, tmp_path: Path, strategy: str) -> None:
    options = parts(2, "training.steps=100000", *by(strategy, tmp_path))
    child = lmlong("train", tiny, *options, "--out", tmp_path / "run", start_new_session=True)
    while not metrics(tmp_path / "run") and child.poll() is None:
        time.sleep(0.05)
    os.kill(second_of(child), signal.SIGKILL)
    _, errors = child.communicate(timeout=60)
    assert child.returncode == 1 and "Traceback" not in errors, errors
    assert "error: rank 1 of 2 was killed by SIGKILL, as the system does when memory is short." in errors


@pytest.mark.slow
def test_a_run_by_time_under_torchrun_logs_and_samples(tiny: Path, tmp_path: Path) -> None:
    options = parts(
        2,
        *("training.minutes=0.05", "training.steps=null", "training.validate_every=100000"),
        *("training.loggers=[tensorboard]", "training.sample_tokens=20"),
    )
    torchrun = ["torch.distributed.run", "--nproc-per-node", 2, "--standalone", "-m", "lmlong", "train", tiny]
    (output,), _ = succeed([*torchrun, *options, "--out", tmp_path / "run"], [{}])
    assert output.count("validation ") == 1
    steps = logged_steps(tmp_path / "run")
    assert steps == list(range(1, len(steps) + 1)) and steps
    assert sum("sample" in line for line in metrics(tmp_path / "run")) == 1
    assert len([*(tmp_path / "run" / "tensorboard").glob("events.*")]) == 1


def test_each_target_is_counted_by_one_process(recipe_of: Recipes) -> None:
    """Losses and speeds are sums over all processes divided by these counts."""
    alone, divided = (prepare_new_run(recipe_of(*options)) for options in (ROWS, parts(3)))
    (whole,) = Loader(alone, range(1), rank=0)
    shares = [share for rank in range(3) for share in Loader(divided, range(1), rank)]
    assert all(torch.equal(share.tokens, whole.tokens) for share in shares)
    assert sum((share.counts for share in shares), LossTotals()) == whole.counts


@pytest.fixture
def two_gates() -> Iterator[Path]:
    """A plug-in attention without an effect."""
    load_plugin(file := Path(__file__).parents[1] / "plugins" / "two_gates.py")
    yield file
    unload_plugin(file)


def test_an_attention_without_an_effect_is_refused_before_any_work(recipe_of: Recipes, two_gates: Path) -> None:
    options = (f"plugins=[{two_gates}]", "model.attention.kind=[linear, two_gates]", "devices=2")
    divided = recipe_of(*options, "training.sequence_parallel=2")
    with pytest.raises(
        UsageError, match=r"sequence_parallel: .*two_gates\.py: TwoGates has no `effect`.* Define effect"
    ):
        prepare_new_run(divided)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["training.segment=16"], "segment=16: the parts of a row exchange states layer by layer"),
        (["training.compile=true"], "compile=true: the exchange between the parts of a row cannot be compiled"),
        (["model.dropout=0.1"], "sequence_parallel=2: not supported with model.dropout"),
        (["model.layers=3", "model.downsample.factor=2"], "sequence_parallel=2: not supported with model.downsample"),
        (["training.sequence_parallel=3"], "3 devices cannot read a row together with devices: 2 on nodes: 1"),
        (
            ["nodes=3", "training.sequence_parallel=4"],
            "4 devices cannot read a row together with devices: 2 on nodes: 3",
        ),
        (
            ["devices=128", "training.sequence_parallel=128"],
            "rows of 64 tokens cannot be divided into 128 parts. Use fewer devices.",
        ),
        (
            ["text.rows=documents", "devices=5", "training.sequence_parallel=5"],
            "rows of 4 tokens cannot be divided into 5 parts",
        ),
        (["objective=masked"], "training.sequence_parallel=2: an encoder reads its text at once"),
    ],
)
def test_what_cannot_be_divided_is_refused_by_name(recipe_of: Recipes, options: list[str], why: str) -> None:
    with pytest.raises(RecipeError, match=why):
        recipe_of("devices=2", "training.sequence_parallel=2", *options)
