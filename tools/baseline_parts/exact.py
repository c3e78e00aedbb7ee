"""Measure the digests of all cases, or of those whose name matches, and compare them with earlier ones."""

import os
import re
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import NamedTuple
from unittest.mock import patch

import torch

from baseline_parts.digests import Case, digest, parts
from baseline_parts.workspace import workspace

MODULES = ("gradients", "training", "decoding", "exports", "processes")
"""The modules of this package that hold cases."""


class Measured(NamedTuple):
    """The digests of cases."""

    cases: dict[str, str]
    """One digest for each case that could be measured."""
    parts: dict[str, dict[str, str]]
    """For each of them the digest of every part, by its path."""
    failed: dict[str, str]
    """The error of each case that could not be measured."""


def find_cases(pattern: str = "") -> list[Case]:
    """Return the cases whose name contains a match of a regular expression."""
    known = [case for name in MODULES for case in import_module(f"baseline_parts.{name}").CASES]
    assert len({case.name for case in known}) == len(known), "two cases have the same name"
    return [case for case in known if re.search(pattern, case.name)]


def measure(cases: list[Case]) -> Measured:
    """Compute all cases on one thread. A case that raises is reported, and the others are measured all the same."""
    measured = Measured({}, {}, {})
    with same_everywhere(), workspace() as folder:
        for number, case in enumerate(cases, 1):
            begun = time.perf_counter()
            try:
                of_parts = parts(case.values(folder))
            except Exception as error:
                measured.failed[case.name] = f"{type(error).__name__}: {error}"
                traceback.print_exc()
                continue
            measured.parts[case.name], measured.cases[case.name] = of_parts, digest(of_parts)
            if (seconds := time.perf_counter() - begun) > 2:
                print(f"{number} of {len(cases)}, {case.name}: {seconds:.0f} s", file=sys.stderr, flush=True)
    return measured


@contextmanager
def same_everywhere() -> Iterator[None]:
    """Let this process and those that it starts compute on one CPU thread, because sums of several threads may round
    differently, and run Triton's kernels in its interpreter. Triton reads that variable when it is first imported."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with patch.dict(os.environ, OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="", TRITON_INTERPRET="1"):
            yield
    finally:
        torch.set_num_threads(threads)


def differences(now: Measured, before: Mapping[str, str], whole: bool) -> list[str]:
    """Return what is not as `before`, a line each; of a `whole` measurement also the cases that are gone."""
    lines = [f"failed: {name}: {error.splitlines()[0]}" for name, error in now.failed.items()]
    lines += [f"differs: {name}" for name, value in now.cases.items() if before.get(name, value) != value]
    missing = before.keys() - now.cases.keys() - now.failed.keys() if whole else ()
    return lines + [f"missing: {name}" for name in sorted(missing)]
