"""Processes that read parts of the same rows compute what one process does: here they are threads of one process."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest
import torch
from models import stirred
from torch import Tensor

from lmlong import recipe
from lmlong.attention.device_policy import CPU_POLICY, GPU_POLICY, DevicePolicy, use_policy
from lmlong.attention.laws import error
from lmlong.model.language_model import LanguageModel
from lmlong.model.sequence_group import SequenceGroup
from lmlong.model.state import detach_state, state_tensors

VOCABULARY, TOKENS = 20, 150

KINDS: dict[str, dict[str, object]] = {
    "linear": {"kind": "linear"},
    "fixed decay": {"kind": "linear", "decay": "fixed"},
    "channel": {"kind": "linear", "decay": "channel"},
    "no decay": {"kind": "linear", "decay": "none"},
    "favor": {"kind": "linear", "feature_map": "favor"},
    "delta": {"kind": "delta"},
    "window": {"kind": "window", "window": 30},
    "parallel window": {"kind": "linear", "parallel_window": 30},
    "parallel window and delta": {"kind": "delta", "parallel_window": 30},
    "softmax": {"kind": "softmax"},
    "ngram": {"kind": "ngram", "ngram": recipe.Ngram(buckets=32)},
    "mixed": {"kind": ["linear", "window"], "window": 30},
}


class Threads(SequenceGroup):
    """The group of a thread. All threads wait for each other in each exchange."""

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
        return torch.stack([each[self.rank] for each in self._all(x)]).sum(0)

    def from_last(self, x: Tensor) -> Tensor:
        return self._all(x)[-1]


def in_threads(size: int, work: Callable[[SequenceGroup], Any]) -> list[Any]:
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


def build(kind: str, checkpointing: bool = False, policy: DevicePolicy = CPU_POLICY, **shape: Any) -> LanguageModel:
    options = recipe.Model(width=16, layers=2, heads=2, attention=recipe.Attention(**KINDS[kind]), **shape)  # type: ignore[arg-type]
    model = stirred(LanguageModel(options, VOCABULARY, checkpointing), 0.3).double()
    model.set_state_dtype(torch.float64)
    use_policy(model, policy)
    return model


def text(starts: list[int], rows: int = 2, time: int = TOKENS) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens, targets and document starts; documents start in the first row only."""
    tokens = torch.randint(VOCABULARY, (rows, time + 1), generator=torch.Generator().manual_seed(1))
    document_starts = torch.zeros(rows, time, dtype=torch.bool)
    document_starts[0, starts] = True
    return tokens[:, :-1], tokens[:, 1:].clone(), document_starts


def assert_same(model: LanguageModel, size: int, batch: tuple[Tensor, Tensor, Tensor], state: Any = None) -> None:
    """Compare the loss, all gradients and the state after."""
    weights = list(model.parameters())

    def of_part(group: SequenceGroup) -> Any:
        loss, after = model.loss_of_part(*batch, state, group)
        grads = torch.autograd.grad(loss, weights, allow_unused=True, materialize_grads=True)
        return loss.detach(), grads, group.state_after(detach_state(after)) if model.constant_state else None

    loss, after = model.loss(*batch, state)
    expected = torch.autograd.grad(loss, weights, allow_unused=True, materialize_grads=True)
    losses, grads, states = zip(*in_threads(size, of_part), strict=True)
    assert error(sum(losses), loss.detach()) < 1e-10
    for (name, _), parts, grad in zip(model.named_parameters(), zip(*grads, strict=True), expected, strict=True):
        assert error(sum(parts), grad) < 1e-10, name
    for state_of_one in states if model.constant_state else ():
        for got, want in zip(state_tensors(state_of_one), state_tensors(after), strict=True):
            assert error(got, want) < 1e-10


@pytest.mark.parametrize("policy", [CPU_POLICY, GPU_POLICY], ids=["by a CPU", "by a GPU's policy"])
@pytest.mark.parametrize("size", [2, 3, pytest.param(8, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS)
def test_parts_of_rows_are_one_text(kind: str, size: int, policy: DevicePolicy) -> None:
    """Documents start on, before and after borders, and the first batch's state is passed to the second."""
    model, border = build(kind, policy=policy), TOKENS // size
    starts = [0, 7, border - 1, border, border + 1, TOKENS - 2]
    assert_same(model, size, text(starts))
    state = detach_state(model.loss(*text(starts))[1]) if model.constant_state else None
    assert_same(model, size, text([border + 5]), state)
    assert_same(model, size, text([]), state)
