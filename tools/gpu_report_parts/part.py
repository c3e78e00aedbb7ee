"""What every part of the report works with: its sizes, its time, where its findings go, and timing in turns."""

import json
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lmlong.bench.speed import Candidate, Result, crossovers, forecast, ratio
from lmlong.bench.timer import MAX_SECONDS, peak_bytes, time_rounds
from lmlong.report.json_values import json_values
from lmlong.report.table import Column, format_table, three_digits

ATTENTIONS = ("elu", "elu-learned", "elu-channel", "favor", "favor-learned")
"""The forms of linear attention that are measured, by their names in `lmlong bench`."""


class Sizes(NamedTuple):
    """How large everything is that is measured or checked."""

    lengths: tuple[int, ...]
    head_dims: tuple[int, ...]
    width: int  # heads x head_dim
    tokens: int  # in a pass at least: shorter texts come in several rows, as they do in training
    checked: int  # tokens that are held against the definition
    recipe: str
    overrides: tuple[str, ...]
    train_lengths: tuple[int, ...]
    prompt: int  # tokens before those that are decoded
    round_seconds: float  # after which no further round of timing is begun
    pass_seconds: float  # of one pass; what would take longer is left out


K = 1024
FULL = Sizes(
    lengths=(2 * K, 16 * K, 64 * K, 256 * K),
    head_dims=(64, 128),
    width=1024,
    tokens=16 * K,
    checked=208,
    recipe="medium",
    overrides=(),
    train_lengths=(16 * K, 64 * K),
    prompt=1 * K,
    round_seconds=MAX_SECONDS / 3,
    pass_seconds=2.0,
)
TINY = Sizes(
    lengths=(64, 128),
    head_dims=(16,),
    width=32,
    tokens=64,
    checked=72,
    recipe="quickstart",
    overrides=("model.width=32", "model.layers=2", "model.heads=2", "text.tokenizer.vocabulary=300"),
    train_lengths=(96,),
    prompt=32,
    round_seconds=0.0,
    pass_seconds=60.0,
)


class Findings:
    """What a part found so far; saved as it goes, so that a part that is killed keeps what it had."""

    def __init__(self, file: Path | None = None, left_out: list[str] | None = None):
        self.file = file
        self.lines: list[str] = []  # of Markdown
        self.figures: dict[str, Any] = {}
        self.failures: list[str] = []
        self.left_out = left_out or []

    def values(self) -> dict[str, Any]:
        return {name: json_values(value) for name, value in vars(self).items() if name != "file"}

    def save(self) -> None:
        assert self.file
        part = self.file.with_suffix(".part")
        part.write_text(json.dumps(self.values()))
        part.replace(self.file)

    def fail(self, what: str, failure: BaseException) -> None:
        said = str(failure).strip().partition("\n")[0]
        self.failures.append(f"{what}: {type(failure).__name__}{': ' if said else ''}{said}")


NO_TIME = "no time left"

FATAL = ("CUDA error", "Triton Error [CUDA]")
"""Errors after which a process can use its GPU no more."""


class LeftOutError(Exception):
    """Something is not measured here, and why; that is no failure."""


class Job(NamedTuple):
    """A part's work: how large, where, until when, and where its findings go."""

    sizes: Sizes
    device: torch.device
    deadline: float  # by time.monotonic()
    found: Findings

    @property
    def seconds_left(self) -> float:
        return self.deadline - time.monotonic()

    def attempt(self, what: str, work: Callable[[], Any]) -> Any:
        """Return the result of some work; None, and a note, where it fails, or where time or memory run out."""
        try:
            if self.seconds_left <= 0:
                raise LeftOutError(NO_TIME)
            return work()
        except LeftOutError as reason:
            self.found.left_out.append(f"{what}: {reason}")
        except torch.OutOfMemoryError:
            self.found.left_out.append(f"{what}: needs more memory than there is")
        except Exception as failure:
            traceback.print_exc()  # into the log
            self.found.fail(what, failure)
            if any(told in str(failure) for told in FATAL):
                raise
        return None


def measure(
    job: Job, what: str, length: int, makers: Mapping[str, Callable[[], Candidate]], before: list[Result]
) -> list[Result]:
    """Measure candidates in turns; those that fail, or would take too long by the results before, are noted."""
    ready: dict[str, Candidate] = {}
    peaks: dict[str, int] = {}

    def prepare(name: str) -> int:
        one = ready[name] = makers[name]()
        if forecast(before, name, "bf16", one) > job.sizes.pass_seconds:
            raise LeftOutError(f"a pass would take longer than {job.sizes.pass_seconds:g} s")
        one.call()  # kernels are compiled, and AdamW's moments made, at the first call
        return one.input_bytes + peak_bytes(one.call, job.device)

    for name in makers:
        peak = job.attempt(f"{name}, {what}, {length:,} tokens", lambda name=name: prepare(name))
        if peak is None:
            ready.pop(name, None)
        else:
            peaks[name] = peak
    seconds = time_rounds({name: one.call for name, one in ready.items()}, job.device, job.sizes.round_seconds)
    return [
        Result(name, "bf16", length, one.tokens, seconds[name], one.io_bytes, peaks[name])
        for name, one in ready.items()
    ]


def figures(results: list[Result]) -> dict[str, Any]:
    """Return all seconds and bytes, and the ratios to softmax."""
    rows = [{**one._asdict(), "tokens_per_second": one.speeds[1], "ratio": ratio(results, one)} for one in results]
    return {"results": rows, "faster_from": crossovers(results)}


def lines(results: list[Result]) -> list[str]:
    """Return a table of results, in a block that keeps its columns."""
    widths = {"tokens": 8, "": 2, "what": 26, "ms": 10, "±": 6, "tokens/s": 14, "MB": 10, "x softmax": 11}
    formats = {"tokens": ",", "±": ".0%", "tokens/s": ",.0f", "MB": ",.1f"}
    columns = [
        Column(title, width, formats.get(title, ""), "<" if title == "what" else ">") for title, width in widths.items()
    ]
    rows = []
    for one in sorted(results, key=lambda one: one.length):
        low, middle, high = one.speeds
        speed = [three_digits(1e3 * one.tokens / middle), (high - low) / 2 / middle, middle]
        rows.append([one.length, None, one.name, *speed, one.peak / 1e6, three_digits(ratio(results, one))])
    return ["```", *format_table(columns, rows), "```"]
