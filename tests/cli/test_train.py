"""`lmlong train`: a run ends with a result, a sample and commands to try next, which work as they are printed."""

import shlex
import signal
from pathlib import Path
from typing import Any

import pytest

from lmlong.attention.plugins import load_plugin, unload_plugin
from lmlong.cli.after_training import next_commands
from lmlong.recipe import file as recipe_file
from lmlong.training import run
from lmlong.training.metrics_log import METRICS_FILE, read_entries
from lmlong.training.progress import Progress

from .conftest import TWO_GATES, Command


@pytest.mark.parametrize(
    ("name", "overrides", "commands"),
    [
        ("quickstart", (), ["lmlong generate runs/new", "lmlong eval runs/new"]),
        ("masked", (), ["lmlong eval runs/new"]),
        ("logs", (), ["lmlong score runs/new app.log --above 8", "lmlong eval runs/new"]),
        (
            "logs",
            ("text.sources.0.paths=a b.log",),
            ["lmlong score runs/new 'a b.log' --above 8", "lmlong eval runs/new"],
        ),
        (
            "quickstart",
            ("model.attention.kind=two_gates",),
            [f"lmlong {word} runs/new --plugin 'two gates.py'" for word in ("generate", "eval")],
        ),
    ],
)
def test_what_to_try_next_depends_on_the_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, overrides: tuple[str, ...], commands: list[str]
) -> None:
    """Without its plug-in no command reads a run."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "two gates.py").write_text(TWO_GATES.read_text())
    load_plugin("two gates.py")
    try:
        assert next_commands(Path("runs/new"), recipe_file.load(name, overrides, load_plugin)) == commands
    finally:
        unload_plugin("two gates.py")


def test_run_ends_with_result_sample_and_next_commands(lmlong: Command) -> None:
    longer = ("train", "mine.yaml", "training.steps=300", "training.learning_rate=1e-2", "--out", "runs/long")
    ended = lmlong(*longer)
    result, _, rest = ended.stdout.partition("\nsample:\n")
    sample, _, commands = rest.partition("\n\nnext:\n")
    assert ", float32 on " in ended.stderr
    assert ended.returncode == 0 and "gzip -9" in result and "bits per byte" in result
    assert len(sample) > 20 and all(line.startswith("  ") for line in sample.splitlines() if line)
    assert all(character.isprintable() or character in "\n\t" for character in sample)
    assert commands.splitlines() == ["  lmlong generate runs/long", "  lmlong eval runs/long"]
    assert "training computed in      float32\n" in lmlong("info", "runs/long").stdout
    again = lmlong(*longer, "--resume", "auto")
    assert again.returncode == 0 and "sample:" not in again.stdout, "nothing was trained"


def test_diverged_run_is_one_message(lmlong: Command) -> None:
    ended = lmlong("train", "mine.yaml", "--out", "diverged", "training.learning_rate=1e30", "training.steps=5")
    assert (ended.returncode, ended.stdout) == (3, "")
    assert "step 2: the norm of the gradient is" in ended.stderr and "Traceback" not in ended.stderr


def test_printed_command_resumes_a_stopped_run(place: Path, lmlong: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether or not the folder has the name of the recipe, and also when the run is given in place of a recipe."""
    log = Progress.step

    def step_with_signal(progress: Progress, step: int, *more: Any) -> float:
        if step == 1:
            signal.raise_signal(signal.SIGINT)
        return log(progress, step, *more)

    monkeypatch.setattr("lmlong.native.threads.set_threads", lambda count: None)  # which holds for all of the process
    for out, more, kept in (("runs/stopped", ["name=stopped"], ""), ("other", ["--threads=1"], " --threads 1")):
        with monkeypatch.context() as patch:
            patch.setattr(Progress, "step", step_with_signal)
            stopped = lmlong("train", "mine.yaml", *more, "--out", out)
        command = stopped.stdout.partition("Resume by: ")[2].strip()
        assert stopped.returncode == 130 and command == f"lmlong train {out}/recipe.yaml --resume auto{kept}"
        refused = lmlong("train", out, "--resume", "auto")
        assert (refused.returncode, refused.stderr) == (2, f"error: {out}: is a run. Resume it by: {command}\n")
        resumed = lmlong(*shlex.split(command)[1:])
        assert resumed.returncode == 0 and "bits per byte" in resumed.stdout
        assert "\nno sample: the model predicts no better" in resumed.stdout and "\nsample:" not in resumed.stdout
        assert [line["step"] for line in read_entries(place / out / METRICS_FILE) if "loss" in line][-1] == 2


def test_interrupt_before_the_first_step_is_one_line(
    place: Path, lmlong: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "TrainingModule", lambda *given: signal.raise_signal(signal.SIGINT))
    stopped = lmlong("train", "mine.yaml", "--out", "early")
    assert (stopped.returncode, stopped.stdout) == (130, "")
    assert stopped.stderr.splitlines()[-1] == "stopped before the first step; nothing was saved"
    assert not (place / "early").exists()


def test_dry_run_leaves_nothing(place: Path, lmlong: Command) -> None:
    result = lmlong("train", "mine.yaml", "--dry-run", "--out", "dry")
    assert result.returncode == 0, result.stderr
    rows = dict(line.split(maxsplit=1) for line in result.stdout.splitlines())
    assert rows["step"].endswith(" s, 1 batch of 2 x 16 tokens") and rows["run"].startswith("2 steps, about ")
    assert list(rows) == ["device", "parameters", "step", "memory", "run", "checkpoint"]
    assert not (place / "dry").exists()
