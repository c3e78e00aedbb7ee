"""Processes that read parts of the same rows compute what one process does: here they are threads of one process."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest
import torch
from model.parts import KINDS, TOKENS, build, text
from models import LIKE_LLAMA
from torch import Tensor

from lmlong.attention.device_policy import CPU_POLICY, GPU_POLICY, DevicePolicy
from lmlong.attention.laws import error
from lmlong.model.language_model import LanguageModel
from lmlong.model.segments import text_loss
from lmlong.model.sequence_group import SequenceGroup
from lmlong.model.state import detach_state, state_tensors
from lmlong.training.sequence_processes import loss_of_part


class Threads(SequenceGroup):
    """The group of a thread. All threads wait for each other in each exchange."""

    bytes_sent = 0
    """What this thread has added to exchanges, to each of the others."""

    def __init__(self, rank: int, size: int, barrier: Barrier, given: list[Tensor | None]):
        self.rank, self.size, self.barrier, self.given = rank, size, barrier, given

    def _all(self, x: Tensor) -> list[Tensor]:
        self.given[self.rank] = x
        self.barrier.wait(timeout=60)
        every = [x for x in self.given if x is not None]
        self.barrier.wait(timeout=60)
        return every

    def gather(self, x: Tensor) -> Tensor:
        self.bytes_sent += x.nbytes * (self.size - 1)
        return torch.stack(self._all(x))

    def sum_of_own(self, x: Tensor) -> Tensor:
        self.bytes_sent += x.nbytes // self.size * (self.size - 1)
        return torch.stack([each[self.rank] for each in self._all(x)]).sum(0)

    def from_last(self, x: Tensor) -> Tensor:
        return self._all(x)[-1]


def in_threads(size: int, work: Callable[[Threads], Any]) -> list[Any]:
    """Return the results of some work by each process of a group."""
    barrier, given = Barrier(size), [None] * size

    def run(rank: int) -> Any:
        try:
            return work(Threads(rank, size, barrier, given))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(run, range(size)))


def assert_same(model: LanguageModel, size: int, batch: tuple[Tensor, Tensor, Tensor], state: Any = None) -> None:
    """Compare the loss, all gradients and the state after."""
    weights = list(model.parameters())

    def of_part(group: SequenceGroup) -> Any:
        loss, after = loss_of_part(model, *batch, state, group)
        grads = torch.autograd.grad(loss, weights, allow_unused=True, materialize_grads=True)
        return loss.detach(), grads, group.state_after(detach_state(after)) if model.constant_state else None

    loss, after = text_loss(model, *batch, state)
    expected = torch.autograd.grad(loss, weights, allow_unused=True, materialize_grads=True)
    losses, grads, states = zip(*in_threads(size, of_part), strict=True)
    assert error(sum(losses), loss.detach()) < 1e-10
    for (name, _), parts, grad in zip(model.named_parameters(), zip(*grads, strict=True), expected, strict=True):
        assert error(sum(parts), grad) < 1e-10, name
    for state_of_one in states if model.constant_state else ():
        for got, want in zip(state_tensors(state_of_one), state_tensors(after), strict=True):
            assert error(got, want) < 1e-10


@pytest.mark.parametrize(
    ("size", "policy"), [(3, CPU_POLICY), (2, GPU_POLICY)], ids=["three by a CPU", "two by a GPU's policy"]
)
@pytest.mark.parametrize("kind", KINDS)
def test_parts_of_rows_are_one_text(kind: str, size: int, policy: DevicePolicy) -> None:
    """Documents start on, before and after borders, and the first batch's state is passed to the second."""
    model, border = build(kind, policy=policy), TOKENS // size
    starts = [0, 7, border - 1, border, border + 1, TOKENS - 2]
    assert_same(model, size, text(starts))
    state = detach_state(text_loss(model, *text(starts))[1]) if model.constant_state else None
    assert_same(model, size, text([border + 5]), state)
    assert_same(model, size, text([]), state)


@pytest.mark.parametrize("time", [3, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_parts_may_be_shorter_than_a_convolution(kind: str, time: int) -> None:
    """A part of one token is read from the last inputs of several parts before it."""
    model = build(kind)
    assert_same(model, 3, text([], time=time))
    state = detach_state(text_loss(model, *text([7], time=9))[1]) if model.constant_state else None
    assert_same(model, 3, text([time - 2, time - 1], time=time), state)


@pytest.mark.parametrize("kind", ["linear", "favor", "window", "softmax", "parallel window"])
def test_heads_that_share_keys_are_read_in_parts(kind: str) -> None:
    shape = {**LIKE_LLAMA, "kv_heads": 1}
    assert_same(build(kind, **shape), 3, text([40, 50, 51]))


def test_added_heads_are_read_in_parts() -> None:
    assert_same(build("linear", add_ngram=[1]), 3, text([40, 50, 51]))


@pytest.mark.slow
@pytest.mark.parametrize("size", [8, 64])
@pytest.mark.parametrize("kind", KINDS)
def test_many_parts_are_one_text(kind: str, size: int) -> None:
    assert_same(build(kind), size, text([0, 30, 75, 76]))


@pytest.mark.parametrize("kind", ["linear", "softmax"])
def test_activations_are_recomputed(kind: str) -> None:
    assert_same(build(kind, checkpointing=True), 2, text([40]))


def test_a_part_without_targets() -> None:
    tokens, targets, starts = text([])
    targets[:, : TOKENS // 2] = -100
    assert_same(build("linear"), 2, (tokens, targets, starts))


@pytest.mark.parametrize(
    ("kind", "grows"), [("linear", False), ("delta", False), ("window", False), ("ngram", False), ("softmax", True)]
)
def test_bytes_sent_do_not_depend_on_the_length(kind: str, grows: bool) -> None:
    model = build(kind)

    def sent(group: Threads, time: int) -> int:
        loss, _ = loss_of_part(model, *text([], time=time), None, group)
        torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
        return group.bytes_sent

    short, long = (sum(in_threads(2, lambda group, time=time: sent(group, time))) for time in (100, 400))
    assert long > 3 * short if grows else long == short
