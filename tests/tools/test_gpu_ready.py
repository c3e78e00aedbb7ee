"""The counts of operations and memory in the form for a GPU, and what they say of faults."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from machine import needs_fla, needs_triton
from torch._subclasses.fake_tensor import FakeTensorMode

from lmlong.attention.device_policy import CPU_POLICY
from lmlong.model.language_model import LanguageModel

TOOLS = Path(__file__).resolve().parents[2] / "tools"

SHORT, LONG = 1024, 16384


@pytest.fixture
def counts() -> ModuleType:
    from gpu_ready_parts import counts

    counts.build.cache_clear()
    return counts


def test_operations_and_bytes_are_counted(counts: ModuleType) -> None:
    with FakeTensorMode():
        x = torch.zeros(1000)
        with counts.Watch() as watch:
            y = torch.empty(1000)
            y.copy_(x.view(10, 100).flatten()).add_(1)
            assert (watch.count, watch.now, watch.peak) == (2, 4000, 4000)
            z = x[::2].sum() + (y * 2).sum()
            assert watch.operations["aten.sum.default"] == 2 and watch.count == 6
            assert (watch.now, watch.peak) == (4004, 8008)
            del y, z
        assert watch.now == 0


@pytest.mark.parametrize(
    "kind",
    ["window", *(pytest.param(f"{kind} by fla", marks=[needs_fla, pytest.mark.slow]) for kind in ("delta", "channel"))],
)
def test_operations_do_not_grow_with_the_text(counts: ModuleType, kind: str) -> None:
    rows, loss, failures = counts.check([kind], (SHORT, LONG), width=64)
    assert not failures
    for row in rows:
        assert 100 < row.train[0].operations == row.train[1].operations < 400
        assert 0 < row.decode.operations < 200
    assert loss[0].operations < loss[1].operations < 4 * loss[0].operations  # four pieces


def test_growth_above_limits_is_a_failure(counts: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counts, "GPU_POLICY", CPU_POLICY)
    monkeypatch.setattr(counts, "TEMPORARY", 1e6)
    monkeypatch.setitem(counts.KINDS, "linear", counts.KINDS["linear"]._replace(limit=300))
    _, _, failures = counts.check(["linear"], (SHORT, 4096), width=64)
    said = " ".join(failures)
    assert "linear: " in said and "operations with the loss, more than 300" in said
    assert "linear with document starts, training:" in said and "operations grow to" in said
    assert "GB of temporary tensors" in said


def test_wait_is_a_failure(counts: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = LanguageModel.forward

    def waits(model: LanguageModel, tokens: torch.Tensor, *rest: object) -> object:
        return forward(model, tokens, *rest) if (tokens == 0).any() else None  # type: ignore[arg-type]

    monkeypatch.setattr(LanguageModel, "forward", waits)
    rows, _, failures = counts.check(["window"], (SHORT, LONG), width=64)
    assert "window, training: waits for aten._local_scalar_dense.default" in failures
    assert "waits" in counts.lines(rows, [counts.Pass()] * 2, (SHORT, LONG))[2]


def run(*words: str) -> subprocess.CompletedProcess[str]:
    """Run the tool in a process of its own: in that of the tests, Triton interprets kernels."""
    command = [sys.executable, str(TOOLS / "gpu_ready"), *words]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, "TRITON_INTERPRET": "1"})


@pytest.mark.slow
@needs_triton
def test_launches_of_triton_kernels_are_counted(tmp_path: Path) -> None:
    done = run("count", "--quick", "--only", "linear by Triton", "--json", str(tmp_path / "figures.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 80
    (one, several) = json.loads((tmp_path / "figures.json").read_text())["count"]["kinds"]
    assert not one["starts"] and several["starts"]
    assert sum(count for name, count in one["training"][0]["names"].items() if "triton" in name) >= 5


@pytest.mark.slow
@needs_triton
def test_the_program_is_ready_for_a_gpu() -> None:
    done = run()
    assert done.returncode == 0, done.stdout + done.stderr
