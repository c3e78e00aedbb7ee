"""What a dry run reports of real steps."""

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from lmlong.checkpoint import read
from lmlong.errors import LmlongError, UsageError
from lmlong.inference.loading import open_run
from lmlong.model.allocations import bytes_of_step
from lmlong.model.base import count_parameters
from lmlong.training import prepare
from lmlong.training.dry_run import DryRun, dry_run, memory_options
from lmlong.training.measured_steps import measure
from lmlong.training.prepare import prepare_run
from lmlong.training.run import train

from .conftest import Recipes


@pytest.mark.parametrize(
    "options",
    [
        ("training.accumulate=2", "model.downsample.factor=2", "model.layers=4", "text.rows=documents"),
        ("objective=masked", "model.attention.kind=full", "training.optimizer=adamw"),
    ],
    ids=["causal", "masked"],
)
def test_result_is_that_of_the_run(
    recipe_of: Recipes, tmp_path: Path, options: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    """What the child process does, in this one."""
    recipe = recipe_of(*options, "training.steps=2")
    measure(recipe, limit=60)
    _, _, last = map(json.loads, capsys.readouterr().out.splitlines())  # before, after the first step and the second
    result = DryRun(**last)
    train(recipe, tmp_path / "run")
    written = sum(file.stat().st_size for file in read.find(tmp_path / "run").iterdir())
    assert result.checkpoint_bytes == pytest.approx(written, rel=0.3)
    assert result.parameters == count_parameters(open_run(tmp_path / "run", "cpu").model)
    assert (result.batches, result.rows, result.length, result.steps) == (recipe.training.accumulate, 4, 64, 2)
    assert result.run_seconds == pytest.approx(2 * result.step_seconds)
    assert result.peak_bytes and not result.too_long and not result.notes


def test_slow_rows_are_not_measured(recipe_of: Recipes) -> None:
    recipe = recipe_of("text.sequence_length=1024", "devices=2", "training.sequence_parallel=2")
    result = dry_run(recipe, limit=1e-9)
    assert (result.too_long, result.longest, result.length) == ("time", 512, 64)  # of each of two processes
    assert result.run_seconds == pytest.approx(12 * 8 * result.step_seconds)
    assert "\nnot measured  rows of 512 tokens: two steps would take over" in result.text()
    assert "\nnote          one of 2 processes was measured" in result.text()


@pytest.mark.parametrize(
    ("ending", "error", "message"),
    [
        ("""echo '{"error": "no text", "exit_code": 2}'""", UsageError, "^no text$"),
        ("kill -9 $$", LmlongError, "out of memory before the first step"),
        ("exit 3", LmlongError, "ended with status 3"),
    ],
)
def test_failure_of_the_child_process_is_reported(
    recipe_of: Recipes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str, error: type, message: str
) -> None:
    """The child is a shell script: a real one takes seconds and does not fail on request."""
    script = tmp_path / "python"
    script.write_text(f"#!/bin/sh\n{ending}\n")
    script.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(script))
    with pytest.raises(error, match=message):
        dry_run(recipe_of())


@pytest.mark.slow  # two processes
@pytest.mark.skipif(sys.platform != "linux", reason="reads the size of a process from /proc")
def test_too_large_model_is_reported(tiny: Path) -> None:
    """Of 130 million parameters: 0.5 GB of weights fit, but not their gradients and moments."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + 10**9
    done = subprocess.run(
        [sys.executable, "-m", "lmlong", "train", tiny, "--dry-run", "model.width=1280", "model.layers=8"],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (most, most)),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    rows = [tuple(line.split(maxsplit=1)) for line in done.stdout.splitlines()]
    assert ("not", "measured  even short rows: they need more memory than there is") in rows
    assert ("saves", "memory  training.segment=64") in rows


def test_memory_options_are_valid(recipe_of: Recipes) -> None:
    batch, parts = "training.batch_size=1 training.accumulate=4", "devices=2 training.sequence_parallel=2"
    recompute = "training.activation_checkpointing=true"
    assert memory_options(recipe_of(), 512) == ["training.segment=512", recompute, batch, parts]
    assert memory_options(recipe_of("model.attention.kind=softmax", recompute), 512) == [batch, parts]
    alone = recipe_of("training.batch_size=1", "model.dropout=0.1", "training.segment=64")
    assert memory_options(alone, 0) == [recompute]


def test_activations_are_recomputed_if_a_step_would_not_fit(
    recipe_of: Recipes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The estimate counts the tensors of a step, and grows with the tokens of a batch."""
    kept = recipe_of("text.sequence_length=256")
    needed = bytes_of_step(kept, 300)
    assert 1.8 < bytes_of_step(recipe_of("text.sequence_length=256", "training.batch_size=8"), 300) / needed < 2.2
    assert bytes_of_step(recipe_of("text.sequence_length=256", "training.activation_checkpointing=true"), 300) < needed
    for memory, recomputes in ((1 << 40, False), (needed, True), (None, True)):
        monkeypatch.setattr(prepare, "total_memory", lambda device, memory=memory: memory)
        monkeypatch.setattr(prepare, "check_memory", lambda *_: None)
        made = prepare_run(recipe_of("text.sequence_length=256", "training.activation_checkpointing=auto"))
        assert made.recipe.training.activation_checkpointing is recomputes
        assert made.model.activation_checkpointing is recomputes
