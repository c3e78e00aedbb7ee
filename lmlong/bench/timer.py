"""Time and peak memory of a computation; computations that are compared are timed in turns."""

import statistics
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lmlong.model.device import synchronize

Pass = Callable[[], object]
"""One computation, from its inputs to its results."""

MIN_ROUNDS, MAX_ROUNDS, MAX_SECONDS = 3, 15, 15.0
"""Rounds timed at least and at most, and the seconds after which no more are begun."""


def time_rounds(
    passes: Mapping[str, Pass], device: torch.device, max_seconds: float = MAX_SECONDS
) -> dict[str, list[float]]:
    """Return the seconds of each pass by round; all have their turn in every round, so that noise meets them alike.

    Run each pass once before, as its first run may compile or allocate what later ones reuse.
    """
    seconds: dict[str, list[float]] = {name: [] for name in passes}
    begun = time.perf_counter()
    for done in range(MAX_ROUNDS):
        if done >= MIN_ROUNDS and time.perf_counter() - begun > max_seconds:
            break
        for name, call in passes.items():
            seconds[name].append(time_once(call, device))
    return seconds


def time_once(call: Pass, device: torch.device) -> float:
    """Return the seconds of one pass."""
    begun = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - begun


def quartiles(values: Sequence[float]) -> list[float]:
    """Return the lower quartile, the median and the upper quartile."""
    return statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [*values] * 3


def peak_bytes(call: Pass, device: torch.device) -> int:
    """Return the most bytes of tensors that a call allocates and holds at one time, its result included.

    On a GPU as its allocator counts them; elsewhere without what a single operation of torch allocates inside.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with _Allocations() as allocations:
        call()
    return allocations.peak


class _Allocations(TorchDispatchMode):
    """Counts the bytes of all tensors that are created, as long as they live."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.known: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.known.update(_storages((args, kwargs)))  # what was there before does not count, nor a view of it
        result = function(*args, **kwargs)
        for storage in _storages(result):
            if storage not in self.known:
                self.known.add(storage)
                self._change(storage.nbytes())
                weakref.finalize(storage, self._change, -storage.nbytes())
        return result

    def _change(self, size: int) -> None:
        self.now += size
        self.peak = max(self.peak, self.now)


def _storages(tree: Any) -> list[torch.UntypedStorage]:
    return [leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
