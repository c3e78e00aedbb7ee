"""What a computation costs: seconds, taken in turns with what it is compared with, and bytes."""

import platform
import re
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Pass = Callable[[], object]

LEAST, MOST, ENOUGH = 3, 15, 15.0
"""Rounds that are timed at least and at most, and the seconds after which no more are begun."""


def taken(passes: Mapping[str, Pass], device: torch.device) -> dict[str, list[float]]:
    """The seconds of each pass in each round: in every round all are done, so that a disturbance meets them alike.

    They should have been done once before, since the first time makes what is made once.
    """
    seconds: dict[str, list[float]] = {name: [] for name in passes}
    begun = time.perf_counter()
    for done in range(MOST):
        if done >= LEAST and time.perf_counter() - begun > ENOUGH:
            break
        for name, call in passes.items():
            seconds[name].append(once(call, device))
    return seconds


def once(call: Pass, device: torch.device) -> float:
    """The seconds of one pass."""
    begun = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begun


def held(call: Pass, device: torch.device) -> int:
    """The most bytes of tensors that a call makes and holds at one time, its result among them.

    On a GPU as its allocator counts them; elsewhere without what a single operation of torch holds within itself.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with _Tally() as tally:
        call()
    return tally.most


class _Tally(TorchDispatchMode):
    """Counts the bytes of all tensors that come into being, as long as they are there."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
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
        self.most = max(self.most, self.now)


def _storages(tree: Any) -> list[torch.UntypedStorage]:
    return [leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def machine(device: torch.device) -> str:
    """What figures were taken on."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{threads} thread{'' if threads == 1 else 's'} of {_processor()}"


def _processor() -> str:
    known = Path("/proc/cpuinfo")  # where there is none, platform tells
    found = re.search(r"^model name\s*:\s*(.+)$", known.read_text(), re.MULTILINE) if known.exists() else None
    return found[1] if found else platform.processor() or platform.machine()
