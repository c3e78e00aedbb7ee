"""`lmlong train`: bad input gives one message and nothing half-written; a run ends with a result and a sample."""

import re
import shlex
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from commands import Finished, lmlong
from machine import new_cache

from lmlong.training import run
from lmlong.training.metrics_log import METRICS_FILE, read_entries
from lmlong.training.progress import Progress

TINY = ["text.tokenizer.kind=bytes", "text.sequence_length=16", "model.width=16", "model.layers=1", "model.heads=2"]


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The current folder, with texts and a recipe."""
    folder = tmp_path_factory.mktemp("train")
    (folder / "book.txt").write_text("once upon a time there was a book. " * 40)
    (folder / "latin.txt").write_bytes(b"caf\xe9 " * 200)
    (folder / "mine.yaml").write_text("text: {sources: [{kind: files, paths: [book.txt]}]}\ntraining: {steps: 2}\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("LMLONG_CACHE", str(new_cache(folder)))
        yield folder


@pytest.fixture(scope="module")
def trained(folder: Path) -> Finished:
    """The finished training of runs/mine."""
    return lmlong("train", "mine.yaml", *TINY)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["model.widht=8"], 2, "model.widht=8: unknown key. Did you mean 'width'?"),
        (["text.sources.0.paths=[latin.txt]"], 2, "latin.txt: byte 3 is not UTF-8"),
        (["device=cuda"], 2, "device: cuda was asked for, but torch finds no GPU here. Use auto or cpu."),
        (["--resume", "nowhere"], 4, "nowhere: no such run or checkpoint."),
        (["training.learning_rate=1e30", "training.steps=5"], 3, "step 2: the norm of the gradient is"),
    ],
)
def test_mistake_is_one_message(monkeypatch: pytest.MonkeyPatch, arguments: list[str], code: int, message: str) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # hides a GPU
    result = lmlong("train", "mine.yaml", "--out", "wrong", *TINY, *arguments)
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert (result.returncode, result.stdout) == (code, "")
    assert code == 3 or not Path("wrong").exists()


def test_run_ends_with_result_sample_and_next_commands(trained: Finished) -> None:
    ended = lmlong("train", "mine.yaml", *TINY, "training.steps=60", "--out", "runs/long")
    result, _, rest = ended.stdout.partition("\nsample:\n")
    sample, _, commands = rest.partition("\n\nnext:\n")
    assert re.search(r", (float32|bf16) on ", ended.stderr)  # by what the processor computes in
    assert ended.returncode == 0 and "gzip -9" in result and "bits per byte" in result
    assert len(sample) > 20 and all(line.startswith("  ") for line in sample.splitlines() if line)
    assert all(character.isprintable() or character in "\n\t" for character in sample)
    assert commands.splitlines() == ["  lmlong generate runs/long", "  lmlong eval runs/long"]
    again = lmlong("train", "mine.yaml", *TINY, "--resume", "auto")  # nothing was trained
    assert again.returncode == 0 and "sample:" not in again.stdout


def test_bad_model_shows_no_sample(trained: Finished) -> None:
    assert "\nsample:\n" not in trained.stdout and "\nno sample: the model predicts no better" in trained.stdout


def test_printed_command_resumes_a_stopped_run(trained: Finished, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether or not the folder has the name of the recipe, and also when the run is given in place of a recipe."""
    log = Progress.step

    def step_with_signal(progress: Progress, step: int, *more: Any) -> float:
        if step == 1:
            signal.raise_signal(signal.SIGINT)
        return log(progress, step, *more)

    for out, more in (("runs/stopped", ["name=stopped"]), ("other", [])):
        with monkeypatch.context() as patch:
            patch.setattr(Progress, "step", step_with_signal)
            stopped = lmlong("train", "mine.yaml", *TINY, *more, "--out", out)
        command = stopped.stdout.partition("Resume by: ")[2].strip()
        assert stopped.returncode == 130 and command == f"lmlong train {out}/recipe.yaml --resume auto"
        refused = lmlong("train", out, "--resume", "auto")
        assert (refused.returncode, refused.stderr) == (2, f"error: {out}: is a run. Resume it by: {command}\n")
        resumed = lmlong(*shlex.split(command)[1:])
        assert resumed.returncode == 0 and "bits per byte" in resumed.stdout
        assert [line["step"] for line in read_entries(Path(out) / METRICS_FILE) if "loss" in line][-1] == 2


def test_interrupt_before_the_first_step_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "TrainingModule", lambda *given: signal.raise_signal(signal.SIGINT))
    stopped = lmlong("train", "mine.yaml", *TINY, "--out", "early")
    assert (stopped.returncode, stopped.stdout) == (130, "")
    assert stopped.stderr.splitlines()[-1] == "stopped before the first step; nothing was saved"
    assert not Path("early").exists()


def test_convert_takes_no_value_for_resume() -> None:
    refused = lmlong("convert", "runs/mine", "--to", "mine.yaml", "--resume", "auto")
    assert refused.returncode == 2 and "--resume of convert takes no value" in refused.stderr


def test_dry_run_leaves_nothing() -> None:
    result = lmlong("train", "mine.yaml", *TINY, "--dry-run", "--out", "dry")
    assert result.returncode == 0, result.stderr
    rows = dict(line.split(maxsplit=1) for line in result.stdout.splitlines())
    assert rows["step"].endswith(" s, 1 batch of 8 x 16 tokens") and rows["run"].startswith("2 steps, about ")
    assert list(rows) == ["device", "parameters", "step", "memory", "run", "checkpoint"]
    assert not Path("dry").exists()
