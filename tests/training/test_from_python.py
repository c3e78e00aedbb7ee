"""`lmlong.train` in a program of the user's: in any thread, stopped by signals, by a recipe of typed sections."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import lmlong
from lmlong.checkpoint import read
from lmlong.errors import UsageError
from lmlong.recipe import Files, Model, Text, Tokenizer, Training

from .conftest import Recipes, metrics


def test_thread_trains_like_the_main_thread(recipe_of: Recipes, tmp_path: Path) -> None:
    recipe = recipe_of("model.dropout=0.1")
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    here = lmlong.train(recipe, tmp_path / "here")
    with ThreadPoolExecutor(1) as threads:
        there = threads.submit(lmlong.train, recipe, tmp_path / "there").result(timeout=120)
    assert here._replace(run=there.run) == there
    assert here.losses == there.losses
    assert list(here.losses) == list(range(1, 13))
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == handlers
    weights = [lmlong.load(result.run).model.state_dict() for result in (here, there)]
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())


def test_run_in_a_thread_is_resumed_and_locked(recipe_of: Recipes, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert lmlong.train(recipe_of("training.steps=5"), str(run)).step == 5
    with pytest.raises(UsageError, match="exists"):
        lmlong.train(recipe_of(), run)
    with ThreadPoolExecutor(1) as threads:
        going_on = threads.submit(lmlong.train, recipe_of("training.steps=60"), run, resume="auto")
        while len((run / "metrics.jsonl").read_text().splitlines()) < 7:  # it has begun
            time.sleep(0.001)
        with pytest.raises(UsageError, match="another process is training in it"):
            lmlong.train(recipe_of(), run, overwrite=True)
        assert going_on.result(timeout=120).step == 60
    assert lmlong.train(recipe_of("training.steps=2"), run, overwrite=True).step == 2
    assert lmlong.train(recipe_of("training.steps=2"), run, resume=run).validation is None, "nothing was left to do"


def test_default_folder_and_number_of_processes(
    recipe_of: Recipes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="devices: 2 processes are started by the command `lmlong train`"):
        lmlong.train(recipe_of("devices=2"))
    assert not (tmp_path / "runs").exists()
    assert lmlong.train(recipe_of("training.steps=1")).run == Path("runs/tiny")
    assert lmlong.load("tiny").step == 1


def test_paths_of_typed_sections_are_absolute(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its paths are those of the folder in which it was trained."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(tiny.with_name("book.txt"), "book.txt")
    recipe = lmlong.Recipe(
        text=Text(
            sources=[Files(kind="files", paths=["book.txt"])], tokenizer=Tokenizer(kind="bytes"), sequence_length=64
        ),
        model=Model(width=32, layers=1, heads=2),
        training=Training(steps=2, batch_size=2),
    )
    result = lmlong.train(recipe, "run")
    monkeypatch.chdir("/")
    report = lmlong.evaluate(tmp_path / result.run, lengths=[16], min_documents=1)
    assert report.context[0].sums.totals.bits_per_byte > 0


SCRIPT = """
import signal, sys
import lmlong
for name, accumulate in (("once", 1), ("thrice", 1_000_000)):  # the latter has a step that does not end
    recipe = lmlong.Recipe.load(sys.argv[1], {"training.steps": 100_000, "training.accumulate": accumulate})
    try:
        lmlong.train(recipe, f"{sys.argv[2]}/{name}")
    except KeyboardInterrupt as stop:
        handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
        print(stop, handlers == [signal.default_int_handler, signal.SIG_DFL])
"""


class Script:
    """A program that trains twice, in a process of its own."""

    def __init__(self, recipe: Path, folder: Path):
        self.process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(recipe), str(folder)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
        )

    def interrupt(self, message: str) -> None:
        """Send Ctrl-C, and wait for a message on standard error."""
        self.process.send_signal(signal.SIGINT)
        assert self.process.stderr
        while message not in (line := self.process.stderr.readline()):
            assert line, f"it ended without {message}"

    def wait_until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            time.sleep(0.005)
            assert self.process.poll() is None

    def handles_signals(self) -> bool:
        """Whether training has begun, which only the signals that the process catches tell."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return bool(int(re.findall(r"^SigCgt:\s*(\w+)$", status, re.MULTILINE)[0], 16) >> signal.SIGTERM - 1 & 1)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs the signals that a process catches")
def test_ctrl_c_saves_the_step_and_three_stop_at_once(tiny: Path, tmp_path: Path, recipe_of: Recipes) -> None:
    once, thrice = tmp_path / "once", tmp_path / "thrice"
    script = Script(tiny, tmp_path)
    try:
        script.wait_until(lambda: len(metrics(once)) >= 10)
        script.interrupt("finishing and saving this step first")
        script.wait_until(lambda: (thrice / "environment.json").exists() and script.handles_signals())
        script.interrupt("finishing and saving this step first")
        script.interrupt("this step is being finished and saved; once more to stop at once, without it")
        script.process.send_signal(signal.SIGINT)
        output, errors = script.process.communicate(timeout=60)
    finally:
        script.process.kill()
    assert script.process.returncode == 0, errors
    step = metrics(once)[-1]["step"]
    assert output == (
        f"stopped after step {step}, saved in {once}; resume='auto' continues it True\nstopped at once True\n"
    )
    assert read.find(once).name == f"step-{step:08d}"
    assert lmlong.train(recipe_of(f"training.steps={step + 1}"), once, resume="auto").step == step + 1
    assert not (thrice / ".lock").exists()
    assert json.loads((thrice / "environment.json").read_text())["packages"]


def test_signal_does_not_stop_another_thread(recipe_of: Recipes, tmp_path: Path) -> None:
    heard = threading.Event()
    before = signal.signal(signal.SIGTERM, lambda *_: heard.set())
    try:
        with ThreadPoolExecutor(1) as threads:
            training = threads.submit(lmlong.train, recipe_of("training.steps=40"), tmp_path / "run")
            while len(metrics(tmp_path / "run")) < 5:
                time.sleep(0.001)
            signal.raise_signal(signal.SIGTERM)
            assert training.result(timeout=120).step == 40
        assert heard.is_set(), "the program's own handler was replaced"
    finally:
        signal.signal(signal.SIGTERM, before)
