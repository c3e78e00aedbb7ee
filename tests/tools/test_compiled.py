"""The Triton kernels compiled for GPUs that are not there, and what is reported of them."""

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from machine import needs_triton

TOOLS = Path(__file__).resolve().parents[2] / "tools"

pytestmark = needs_triton


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(TOOLS)
    from gpu_ready_parts import compiled

    return compiled


def check(compiled: ModuleType, quick: bool) -> tuple[list[dict[str, Any]], list[str]]:
    lines: list[str] = []
    rows, failures = compiled.check(quick, lines.append)
    assert lines[0] == compiled.HEADER and sorted(lines[1:]) == sorted(map(compiled.line, rows))
    return rows, failures


def test_kernels_compile_for_every_gpu(compiled: ModuleType) -> None:
    rows, failures = check(compiled, quick=True)
    assert not failures
    assert {row["arch"] for row in rows} == compiled.SHARED.keys()
    assert all(row["registers"] > 0 and row["shared"] > 0 and row["tensor_cores"] for row in rows)


@pytest.mark.slow
def test_all_configurations_compile_within_the_limits_of_every_gpu(compiled: ModuleType) -> None:
    assert check(compiled, quick=False)[1] == []


def test_the_configurations_are_few_and_cover_all_kernels(compiled: ModuleType) -> None:
    launches = compiled.configurations(compiled.PROBLEMS)
    assert len(launches) <= 150
    assert {launch.name for launch in launches} == {*compiled.PRODUCTS, *compiled.WITHOUT_PRODUCTS}
    assert {launch.variant for launch in launches if launch.name == "scan_states"} == {
        *("forth", "forth tiles", "back", "back tiles")
    }


@pytest.mark.parametrize(
    ("reported", "failure"),
    [
        ({"shared": 100 * 1024}, "shared memory of 100 KiB exceeds 99 KiB"),
        ({"spills": 300}, "300 bytes of spills exceed 256"),
        ({"seconds": 30.0}, "30 s to compile exceed 20 s"),
        ({"tensor_cores": {}}, "does not use tensor cores"),
        ({"arch": 90}, "does not use wgmma"),
        ({"error": "CompilationError: at 3:4"}, "CompilationError: at 3:4"),
    ],
)
def test_what_exceeds_a_limit_is_a_failure(compiled: ModuleType, reported: dict[str, Any], failure: str) -> None:
    row = {"kernel": "tile_outputs", "variant": "", "features": 64, "values": 64, "dtype": "bfloat16", "arch": 89}
    row |= {"shared": 1024, "registers": 128, "spills": 0, "tensor_cores": {"mma": 4}, "seconds": 1.0, "error": None}
    assert compiled.failures_of(row) == []
    [told] = compiled.failures_of(row | reported)
    assert told.startswith("tile_outputs 64 x 64 bfloat16 sm_") and told.endswith(failure)
