"""Contests of speed: contestants that do the same work, at growing lengths, timed in turns."""

import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from tqdm import tqdm

from lmlong.bench.cost import ENOUGH, Pass, held, once, taken


class Contender(NamedTuple):
    """One contestant at one length, ready to start."""

    call: Pass
    tokens: int  # that one pass reads or writes
    given: int  # bytes that are there before a pass
    least: int  # bytes of what goes in and what comes out, where that is known
    growth: int  # the power of the length that its time grows with
    measured: bool = True  # whether the bytes that a pass holds are to be measured; else they are those given


class Result(NamedTuple):
    """What one contestant took at one length."""

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
        by_round = [self.tokens / seconds for seconds in self.seconds]
        return statistics.quantiles(by_round, n=4, method="inclusive") if len(by_round) > 1 else by_round * 3


Build = Callable[[str, str, int], Contender]
"""From a contestant's name, a precision and a length."""


def contest(
    build: Build,
    names: Sequence[str],
    precisions: Sequence[str],
    lengths: Sequence[int],
    device: torch.device,
    limit: float,
) -> list[Result]:
    """Every contestant at every length, but for those of which one pass would take longer than the limit."""
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


def forecast(results: Sequence[Result], name: str, precision: str, contender: Contender) -> float:
    """The seconds that a pass will take, from the length before; none are known of the first one."""
    known = [one for one in results if (one.name, one.precision) == (name, precision)]
    if not known:
        return 0.0
    last = known[-1]
    return statistics.median(last.seconds) * (contender.tokens / last.tokens) ** contender.growth


def _round_robin(ready: dict[str, Contender], precision: str, length: int, device: torch.device) -> list[Result]:
    """All contestants at one length. A first pass finds the memory and makes what is made once; of what takes very
    long it is the only one, timed while it counts."""
    peaks: dict[str, int] = {}
    seconds: dict[str, list[float]] = {}
    for name, contender in ready.items():
        first: list[float] = []

        def counted(call: Pass = contender.call, first: list[float] = first) -> None:
            first.append(once(call, device))

        if contender.measured:
            peaks[name] = contender.given + held(counted, device)
        else:
            counted()
            peaks[name] = contender.given
        if first[0] > ENOUGH:
            seconds[name] = first
    seconds |= taken({name: one.call for name, one in ready.items() if name not in seconds}, device)
    return [
        Result(name, precision, length, one.tokens, seconds[name], one.least, peaks[name])
        for name, one in ready.items()
    ]
