"""Processes that read parts of the same rows compute what one process does, and train what it does."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from model.parts import KINDS

from lmlong.attention.laws import error
from lmlong.model.segments import text_loss
from lmlong.model.state import detach_state

from .parts_in_processes import DTYPES, ROWS, Computed, batches, model_of

TESTS = Path(__file__).parents[1]

ALLOWED = {torch.float64: 1e-10, torch.float32: 1e-5}
"""Relative errors of losses, of the norm of the gradient and of each gradient."""


def in_processes(processes: int, parts: int, kinds: list[str], folder: Path) -> list[dict]:
    """What each process has computed. They are programs of their own, for a group exists once in a process."""
    command = [sys.executable, TESTS / "training" / "parts_in_processes.py"]
    path = os.pathsep.join([str(TESTS), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    environment = {**os.environ, "PYTHONPATH": path.rstrip(os.pathsep), "OMP_NUM_THREADS": "1"}
    children = [
        subprocess.Popen([*command, *map(str, (rank, processes, parts, folder)), *kinds], env=environment)
        for rank in range(processes)
    ]
    try:
        assert [child.wait(timeout=300) for child in children] == [0] * processes
    finally:
        for child in children:
            child.kill()
    return [torch.load(folder / f"{rank}.pt") for rank in range(processes)]


@pytest.mark.parametrize(
    ("processes", "parts", "kinds"),
    [
        (2, 2, ["mixed", "ngram"]),
        *(pytest.param(*sizes, [*KINDS], marks=pytest.mark.slow) for sizes in [(2, 2), (3, 3), (4, 4), (4, 2)]),
    ],
    ids=["2", "2, every kind", "3", "4", "two groups of 2"],
)
def test_processes_are_one(tmp_path: Path, processes: int, parts: int, kinds: list[str]) -> None:
    """Documents start on, before and after the borders of ragged parts. Gradients are averaged over all processes."""
    rows = ROWS * processes // parts
    every = in_processes(processes, parts, kinds, tmp_path)
    for kind in kinds:
        for dtype in DTYPES:
            model, state = model_of(kind, dtype), None
            weights = dict(model.named_parameters())
            for name, batch, enters in batches(parts, rows):
                loss, after = text_loss(model, *batch, state if enters else None)
                state = detach_state(after) if model.constant_state else None
                expected = torch.autograd.grad(loss / batch[1].numel(), list(weights.values()))
                norm = torch.nn.utils.get_total_norm(expected)
                computed = [Computed(*of_process[kind, dtype][name]) for of_process in every]
                what, allowed = f"{kind}, {dtype}, {name}", ALLOWED[dtype]
                assert error(torch.stack([each.loss for each in computed]).sum(), loss) < allowed, what
                for each in computed:
                    assert error(each.norm, norm) < allowed, what
                    assert each.gradients.keys() == weights.keys()
                    for weight, gradient in zip(weights, expected, strict=True):
                        assert error(each.gradients[weight], gradient) < allowed, f"{what}: {weight}"
