"""The process of a part: what it measures, one measurement after the other."""

import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch

from gpu_report_parts.figures import LATE, Figures

FATAL = ("CUDA error", "Triton Error [CUDA]")
"""Errors after which a process cannot use its GPU."""

K = 1024


class Sizes(NamedTuple):
    """How large everything is that is measured or checked."""

    head_dims: tuple[int, ...] = (64, 128)
    checked: int = 208  # tokens that are compared with the definition
    lengths: tuple[int, ...] = (2 * K, 16 * K, 64 * K, 256 * K)
    width: int = 1024  # heads x head_dim
    tokens: int = 16 * K  # in a pass at least: shorter texts come in several rows
    recipe: str = "medium"
    overrides: tuple[str, ...] = ()
    train_lengths: tuple[int, ...] = (32 * K, 64 * K)
    prompt: int = 1 * K  # tokens before those that are decoded
    steps: int = 200
    seconds: float = 2.0  # of timing


SMALL = ("model.width=32", "model.layers=2", "model.heads=2", "text.tokenizer.vocabulary=300")
TINY = Sizes((16,), 72, (64,), 32, 64, "quickstart", SMALL, (96,), 32, 6, 0.0)


class Share(NamedTuple):
    """The measurements that one of several processes makes: every n-th."""

    number: int
    processes: int


class LeftOutError(Exception):
    """Something is not measured here, and why; that is no failure."""


class Work(NamedTuple):
    """A measurement, which gives some cells of a row."""

    row: str
    column: str
    cells: Callable[[], dict[str, Any]]


MODULES = {
    "laws": "attentions",
    "attention": "attentions",
    "training": "models",
    "decoding": "models",
    "losses": "models",
}


def part(name: str, out: Path, until: float, seconds: float, tiny: bool, share: Share) -> int:
    """Measure what a share of a part has not measured yet, each within some seconds, until a time. Return 0 if all is
    measured, LATE if there was no time for some, 1 if this process cannot go on."""
    device = torch.device("cpu" if tiny else "cuda")
    figures = Figures(out / "figures.jsonl")
    done = {one[1:3] for one in figures.read() if one.part == name and not one.open}
    works: Iterable[Work] = getattr(import_module(f"gpu_report_parts.{MODULES[name]}"), name)(
        TINY if tiny else Sizes(), device
    )
    for work in list(works)[share.number :: share.processes]:
        if (work.row, work.column) in done:
            continue
        if time.time() > until:
            return LATE
        figures.add(name, work.row, work.column, share=share.number)
        signal.setitimer(signal.ITIMER_REAL, seconds)  # ends this process, wherever it is
        try:
            result: dict[str, Any] = {"cells": work.cells()}
        except LeftOutError as reason:
            result = {"left_out": str(reason)}
        except torch.OutOfMemoryError:
            result = {"left_out": "needs more memory than there is"}
        except Exception as failure:
            traceback.print_exc()
            if any(text in str(failure) for text in FATAL):
                return 1
            result = {"failure": f"{type(failure).__name__}: {str(failure).strip().partition(chr(10))[0]}"}
        signal.setitimer(signal.ITIMER_REAL, 0)
        figures.add(name, work.row, work.column, share=share.number, **result)
        sys.stdout.flush()
    return 0
