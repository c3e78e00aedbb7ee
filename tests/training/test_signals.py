"""Signals that stop training: at whatever moment they come, and however often."""

import io
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lmlong.checkpoint import write
from lmlong.training.checkpoint_store import CheckpointStore
from lmlong.training.run import train
from lmlong.training.signals import StopOnSignal

from .conftest import Recipes, ignored


def test_signal_during_an_agreement_is_heard_next_time() -> None:
    signals, moments = StopOnSignal(), iter([True, False])

    def reduce(number: torch.Tensor, reduce_op: str) -> torch.Tensor:
        """What two ranks come to when the other one heard nothing, and a signal that comes meanwhile."""
        if next(moments):
            signal.raise_signal(signal.SIGTERM)
        return number

    trainer: Any = SimpleNamespace(
        world_size=2, strategy=SimpleNamespace(reduce=reduce, root_device=torch.device("cpu"))
    )
    with signals:
        assert not signals.agree(trainer)
        assert signals.agree(trainer)
    assert signals.agreed == signal.SIGTERM


class Interrupted(io.RawIOBase):
    """A stream to which a signal comes during the first write."""

    written = b""

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        is_first, self.written = not self.written, self.written + bytes(data)
        if is_first:
            signal.raise_signal(signal.SIGTERM)
        return len(data)


def test_signal_during_a_message_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Interrupted()
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(io.BufferedWriter(stream)))
    with StopOnSignal() as signals:
        print("step 1", file=sys.stderr, flush=True)
        print("step 2", file=sys.stderr, flush=True)
    assert signals.received == signal.SIGTERM
    assert b"step 1" in stream.written and b"step 2" in stream.written


def test_nohup_ignores_a_closed_terminal(recipe_of: Recipes, tmp_path: Path, raise_at: Callable) -> None:
    raise_at(2, signal.SIGHUP)
    with ignored(signal.SIGHUP):
        assert train(recipe_of("training.steps=4"), tmp_path / "run").step == 4


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGQUIT", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGXCPU"])
def test_signal_stops_training(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Also those that cluster schedulers send before a time limit: SIGXCPU each second after it, and never at once."""
    monkeypatch.setattr(StopOnSignal, "_discard_output", staticmethod(lambda: None))
    with StopOnSignal() as signals:
        for _ in range(5 if name == "SIGXCPU" else 1):
            signal.raise_signal(signal.Signals[name])
    assert signals.received == signal.Signals[name]


def test_second_signal_does_not_break_the_save(
    recipe_of: Recipes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    written, times = write.write, 2

    def write_with_signals(folder: Path, contents: write.Contents) -> None:
        for _ in range(times):
            signal.raise_signal(signal.SIGQUIT)
        written(folder, contents)

    monkeypatch.setattr(write, "write", write_with_signals)
    recipe = recipe_of("training.steps=9", "training.checkpoint_every=2")
    with pytest.raises(SystemExit):
        train(recipe, tmp_path / "two")
    assert [path.name for path in CheckpointStore(tmp_path / "two" / "checkpoints").all()] == ["step-00000002"]
    assert "the checkpoint is being saved; once more to stop at once, without it" in capsys.readouterr().err
    times = 3
    with pytest.raises(SystemExit):
        train(recipe, tmp_path / "three")
    assert not CheckpointStore(tmp_path / "three" / "checkpoints").all()


def test_handlers_of_user_signals_are_kept() -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: heard.append(number))
    try:
        with StopOnSignal() as signals:
            signal.raise_signal(signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert (heard, signals.received) == ([signal.SIGUSR1], 0)
