"""`lmlong.train` in a program of the user's: in any thread, stopped by signals, by a recipe of typed sections."""

import json
import os
import re
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
from lmlong.recipe import Files, Model, Recipe, Text, Tokenizer, Training

from .conftest import metrics

Recipes = Callable[..., Recipe]


def in_a_thread(call: Callable[[], lmlong.TrainingResult]) -> lmlong.TrainingResult:
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(call).result(timeout=120)


def test_a_thread_trains_what_the_main_thread_trains(recipe_of: Recipes, tmp_path: Path) -> None:
    recipe = recipe_of("model.dropout=0.1")
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    here = lmlong.train(recipe, tmp_path / "here")
    there = in_a_thread(lambda: lmlong.train(recipe, tmp_path / "there"))
    assert here._replace(run=there.run) == there
    assert here.losses == there.losses
    assert list(here.losses) == list(range(1, 13))
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == handlers
    weights = [lmlong.load(result.run).model.state_dict() for result in (here, there)]
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())


def test_a_run_in_a_thread_is_resumed_and_kept_from_others(recipe_of: Recipes, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert lmlong.train(recipe_of("training.steps=5"), str(run)).step == 5
    with pytest.raises(UsageError, match="exists"):
        lmlong.train(recipe_of(), run)
    with ThreadPoolExecutor(1) as threads:
        going_on = threads.submit(lmlong.train, recipe_of("training.steps=200"), run, resume="auto")
        while not ((run / ".lock").exists() and (run / ".lock").read_text()):  # opened, but not taken yet
            time.sleep(0.001)
        with pytest.raises(UsageError, match=f"process {os.getpid()} on .* is training in it"):
            lmlong.train(recipe_of(), run, overwrite=True)
        assert going_on.result(timeout=120).step == 200
    assert lmlong.train(recipe_of("training.steps=2"), run, overwrite=True).step == 2
    assert lmlong.train(recipe_of("training.steps=2"), run, resume=run).validation is None, "nothing was left to do"


def test_without_a_folder_it_is_the_one_of_the_name(
    recipe_of: Recipes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert lmlong.train(recipe_of("training.steps=1")).run == Path("runs/tiny")
    assert lmlong.load("tiny").step == 1


def test_a_recipe_of_typed_sections_means_the_same_from_another_folder(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its paths are those of the folder in which it was trained."""
    monkeypatch.chdir(tmp_path)
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


@pytest.mark.parametrize("where", [in_a_thread, lambda call: call()], ids=["in a thread", "in the main thread"])
def test_several_processes_are_left_to_the_command(recipe_of: Recipes, tmp_path: Path, where: Callable) -> None:
    with pytest.raises(UsageError, match="devices: 2 processes are started by the command `lmlong train` or by torchr"):
        where(lambda: lmlong.train(recipe_of("devices=2"), tmp_path / "run"))
    assert not (tmp_path / "run").exists()


SCRIPT = """
import signal, sys
import lmlong
recipe = lmlong.Recipe.load(sys.argv[1], {"training.steps": 100_000, "training.accumulate": int(sys.argv[3])})
try:
    lmlong.train(recipe, sys.argv[2])
except KeyboardInterrupt as stop:
    print(stop, signal.getsignal(signal.SIGINT) is signal.default_int_handler, signal.getsignal(signal.SIGTERM).name)
"""


class Script:
    """A program that trains, in a process of its own."""

    def __init__(self, recipe: Path, run: Path, accumulate: int = 1):
        self.run, self.told = run, ""
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(recipe), str(run), str(accumulate)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def __enter__(self) -> "Script":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()

    def wait_for(self, words: str) -> None:
        assert self.process.stderr
        while words not in self.told:
            line = self.process.stderr.readline()
            assert line, self.told
            self.told += line

    def wait_for_handlers(self) -> None:
        """Wait until training has begun, of which only the signals that the process catches tell."""
        caught = 0
        while not caught >> signal.SIGTERM - 1 & 1:
            time.sleep(0.005)
            assert self.process.poll() is None
            status = Path(f"/proc/{self.process.pid}/status").read_text()
            caught = int(re.findall(r"^SigCgt:\s*(\w+)$", status, re.MULTILINE)[0], 16)

    def wait_for_steps(self, count: int) -> None:
        while len(metrics(self.run)) < count:
            time.sleep(0.005)
            assert self.process.poll() is None

    def end(self) -> tuple[str, str]:
        output, errors = self.process.communicate(timeout=60)
        return output, self.told + errors


def test_ctrl_c_saves_the_step_and_is_a_keyboard_interrupt(tiny: Path, tmp_path: Path, recipe_of: Recipes) -> None:
    with Script(tiny, tmp_path / "run") as script:
        script.wait_for_steps(10)
        script.process.send_signal(signal.SIGINT)
        output, errors = script.end()
    assert script.process.returncode == 0, errors
    step = metrics(tmp_path / "run")[-1]["step"]
    run = tmp_path / "run"
    assert output == f"stopped after step {step}, saved in {run}; resume='auto' continues it True SIG_DFL\n"
    assert read.find(run).name == f"step-{step:08d}"
    assert lmlong.train(recipe_of(f"training.steps={step + 1}"), run, resume="auto").step == step + 1


@pytest.mark.slow  # test_signals.py sends SIGTERM in the process of the tests
def test_sigterm_saves_the_step_and_ends_the_program(tiny: Path, tmp_path: Path) -> None:
    with Script(tiny, tmp_path / "run") as script:
        script.wait_for_steps(10)
        script.process.terminate()
        output, errors = script.end()
    assert (output, script.process.returncode) == ("", 143), errors
    assert "Traceback" not in errors
    assert read.find(tmp_path / "run").name == f"step-{metrics(tmp_path / 'run')[-1]['step']:08d}"


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs the signals that a process catches")
def test_ctrl_c_three_times_ends_training_at_once_but_not_the_program(tiny: Path, tmp_path: Path) -> None:
    with Script(tiny, tmp_path / "run", accumulate=1_000_000) as script:  # a step that does not end
        script.wait_for_handlers()
        script.process.send_signal(signal.SIGINT)
        script.wait_for("finishing and saving this step first")
        script.process.send_signal(signal.SIGINT)
        script.wait_for("this step is being finished and saved; once more to stop at once, without it")
        script.process.send_signal(signal.SIGINT)
        output, errors = script.end()
    assert (output, script.process.returncode) == ("stopped at once True SIG_DFL\n", 0), errors
    assert not (tmp_path / "run" / ".lock").exists()
    assert json.loads((tmp_path / "run" / "environment.json").read_text())["packages"]


def test_a_signal_for_the_main_thread_does_not_stop_another(recipe_of: Recipes, tmp_path: Path) -> None:
    heard = threading.Event()
    before = signal.signal(signal.SIGTERM, lambda *_: heard.set())
    try:
        with ThreadPoolExecutor(1) as threads:
            training = threads.submit(lmlong.train, recipe_of("training.steps=100"), tmp_path / "run")
            while len(metrics(tmp_path / "run")) < 5:
                time.sleep(0.001)
            signal.raise_signal(signal.SIGTERM)
            assert training.result(timeout=120).step == 100
        assert heard.is_set(), "the program's own handler was replaced"
    finally:
        signal.signal(signal.SIGTERM, before)
