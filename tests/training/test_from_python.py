"""`lmlong.train` in a program of the user's: in any thread, stopped by signals, by a recipe of typed sections."""

import json
import shutil
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import lmlong
from lmlong.errors import UsageError
from lmlong.recipe import Files, Model, Text, Tokenizer, Training
from lmlong.training.module import TrainingModule

from .conftest import Recipes, equal, metrics


def test_thread_trains_like_the_main_thread_and_hears_no_signal(recipe_of: Recipes, tmp_path: Path) -> None:
    recipe, heard = recipe_of("model.dropout=0.1"), threading.Event()
    before = signal.signal(signal.SIGTERM, lambda *_: heard.set())
    try:
        handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
        here = lmlong.train(recipe, tmp_path / "here")
        with ThreadPoolExecutor(1) as threads:
            training = threads.submit(lmlong.train, recipe, tmp_path / "there")
            while len(metrics(tmp_path / "there")) < 3:
                time.sleep(0.001)
            signal.raise_signal(signal.SIGTERM)
            there = training.result(timeout=120)
        assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == handlers
        assert heard.is_set(), "the program's own handler was replaced"
    finally:
        signal.signal(signal.SIGTERM, before)
    assert here._replace(run=there.run) == there
    assert here.losses == there.losses
    assert list(here.losses) == list(range(1, 13))
    assert equal(here.run, there.run)


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


def test_ctrl_c_saves_the_step_and_three_stop_at_once(
    recipe_of: Recipes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And the handlers of the program are its own again, which raise KeyboardInterrupt."""
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    once, thrice, take, times = tmp_path / "once", tmp_path / "thrice", TrainingModule.take_figures, 1

    def interrupted(module: TrainingModule) -> object:
        for _ in range(times):
            signal.raise_signal(signal.SIGINT)
        return take(module)

    monkeypatch.setattr(TrainingModule, "take_figures", interrupted)
    with pytest.raises(KeyboardInterrupt, match=f"stopped after step 1, saved in {once}; resume='auto' continues it"):
        lmlong.train(recipe_of(), once)
    assert "finishing and saving this step first" in capsys.readouterr().err
    times = 3
    with pytest.raises(KeyboardInterrupt, match="stopped at once"):
        lmlong.train(recipe_of(), thrice)
    assert "this step is being finished and saved; once more to stop at once" in capsys.readouterr().err
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert not (thrice / ".lock").exists() and json.loads((thrice / "environment.json").read_text())["packages"]
    monkeypatch.undo()
    assert lmlong.train(recipe_of("training.steps=2"), once, resume="auto").step == 2
