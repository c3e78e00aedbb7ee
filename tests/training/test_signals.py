"""A signal is heard at whatever moment it comes."""

import io
import signal
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lmlong.training.signals import StopOnSignal


def test_a_signal_that_comes_while_the_ranks_talk_is_heard_the_next_time() -> None:
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

    def __init__(self) -> None:
        self.written = b""

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        is_first, self.written = not self.written, self.written + bytes(data)
        if is_first:
            signal.raise_signal(signal.SIGTERM)
        return len(data)


def test_a_signal_that_comes_within_a_message_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Interrupted()
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(io.BufferedWriter(stream)))
    with StopOnSignal() as signals:
        print("step 1", file=sys.stderr, flush=True)
        print("step 2", file=sys.stderr, flush=True)
    assert signals.received == signal.SIGTERM
    assert b"step 1" in stream.written and b"step 2" in stream.written
