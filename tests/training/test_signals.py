"""A signal is heard at whatever moment it comes."""

import signal
from types import SimpleNamespace
from typing import Any

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
