"""Speed benchmarks: candidates that do the same work, at growing lengths, timed in turns."""

import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from tqdm import tqdm

from lmlong.bench.timer import MAX_SECONDS, Pass, peak_bytes, quartiles, time_once, time_rounds


class Candidate(NamedTuple):
    """One candidate at one length, ready to run."""

    call: Pass
    tokens: int  # that one pass reads or writes
    input_bytes: int  # held before a pass
    io_bytes: int  # of inputs and outputs, where they are known
    growth: int  # the power of the length by which its time grows
    measured: bool = True  # whether to measure the bytes that a pass allocates; else they are 0


class Result(NamedTuple):
    """The time and memory of one candidate at one length."""

    name: str
    precision: str
    length: int
    tokens: int
    seconds: list[float]  # of one pass, by round
    least: int
    peak: int  # bytes that were held at one time

    @property
    def speeds(self) -> list[float]:
        """Tokens per second: lower quartile, median, upper quartile."""
        return quartiles([self.tokens / seconds for seconds in self.seconds])


Build = Callable[[str, str, int], Candidate]
"""From a candidate's name, a precision and a length."""


def run_benchmark(
    build: Build,
    names: Sequence[str],
    precisions: Sequence[str],
    lengths: Sequence[int],
    device: torch.device,
    limit: float,
) -> list[Result]:
    """Measure every candidate at every length, but for those of which one pass would take longer than the limit."""
    results: list[Result] = []
    with tqdm(total=len(precisions) * len(lengths), leave=False, disable=None) as bar:
        for precision in precisions:
            for length in sorted(lengths):
                bar.set_description(f"{precision}, {length:,} tokens")
                ready = {name: build(name, precision, length) for name in names}
                fit = {name: one for name, one in ready.items() if forecast(results, name, precision, one) <= limit}
                results += _round_robin(fit, precision, length, device)
                bar.update()
    return results


def forecast(results: Sequence[Result], name: str, precision: str, candidate: Candidate) -> float:
    """Return the seconds that a pass will take, by those at the length before; 0 for the first length."""
    known = [one for one in results if (one.name, one.precision) == (name, precision)]
    if not known:
        return 0.0
    last = known[-1]
    return statistics.median(last.seconds) * (candidate.tokens / last.tokens) ** candidate.growth


def _round_robin(ready: dict[str, Candidate], precision: str, length: int, device: torch.device) -> list[Result]:
    """Measure all candidates at one length. The first pass measures memory and warms up; of a candidate that takes very
    long it is the only one, timed as well."""
    peaks: dict[str, int] = {}
    seconds: dict[str, list[float]] = {}
    for name, candidate in ready.items():
        first: list[float] = []

        def counted(call: Pass = candidate.call, first: list[float] = first) -> None:
            first.append(time_once(call, device))

        if candidate.measured:
            peaks[name] = candidate.input_bytes + peak_bytes(counted, device)
        else:
            counted()
            peaks[name] = candidate.input_bytes
        if first[0] > MAX_SECONDS:
            seconds[name] = first
    seconds |= time_rounds({name: one.call for name, one in ready.items() if name not in seconds}, device)
    return [
        Result(name, precision, length, one.tokens, seconds[name], one.io_bytes, peaks[name])
        for name, one in ready.items()
    ]
