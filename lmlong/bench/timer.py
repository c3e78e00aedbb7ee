"""Time and peak memory of computations, which are timed in turns so that they can be compared."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch

from lmlong.model.allocations import Allocations
from lmlong.model.device import synchronize

Pass = Callable[[], object]
"""One computation, from its inputs to its results."""

MIN_ROUNDS, MAX_ROUNDS, MAX_SECONDS = 3, 15, 15.0
"""Minimum and maximum number of rounds, and the seconds after which no further round begins."""


def time_rounds(
    passes: Mapping[str, Pass], device: torch.device, max_seconds: float = MAX_SECONDS
) -> dict[str, list[float]]:
    """Return the seconds of each pass by round; every round runs all passes, so that noise affects all of them.

    Run each pass once before, because the first run may compile or allocate.
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
    """Return the peak of the bytes of tensors that a call allocates, its result included.

    On a GPU as counted by its allocator; elsewhere without the temporary memory inside single operations of torch.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with Allocations() as allocations:
        call()
    return allocations.peak
