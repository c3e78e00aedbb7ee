"""The Triton kernels compiled for GPUs that are not there, and what is reported of them."""

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from machine import needs_triton

TOOLS = Path(__file__).resolve().parents[2] / "tools"

pytestmark = needs_triton

TRACE = """
import os, sys
import torch
from torch._dynamo.backends.common import aot_autograd
from triton.runtime import driver

sys.path.insert(0, sys.argv[1])
from gpu_ready_parts.compiled import Target
from lmlong.attention.feature_maps import Elu
from lmlong.attention.linear.triton.operation import linear_scan
from lmlong.attention.scan import ScanInputs

def count(graph, inputs, **options):
    print(sum("triton_kernel_wrapper" in str(node.target) for node in graph.graph.nodes), flush=True)
    os._exit(0)  # nothing can run the kernels

driver.set_active(Target(90))
scan = torch.compile(linear_scan, backend=aot_autograd(fw_compiler=count, partition_fn=count), fullgraph=True)
q, k, v = (torch.randn(1, 100, 2, 64).transpose(1, 2).requires_grad_() for _ in range(3))
log_decay = torch.zeros(1, 100, 2).mT.requires_grad_()
scan(Elu(64), torch.zeros(1, 2, 64, 65), ScanInputs(q, k, v, torch.zeros(1, 100, dtype=torch.bool), log_decay))
"""
"""Print the number of kernels in the graph of torch.compile."""


@pytest.fixture
def compiled() -> ModuleType:
    from gpu_ready_parts import compiled

    return compiled


def test_kernels_compile_for_every_gpu(compiled: ModuleType) -> None:
    lines: list[str] = []
    rows, failures = compiled.check(quick=True, report=lines.append)
    assert not failures
    assert lines[0] == compiled.HEADER and sorted(lines[1:]) == sorted(map(compiled.line, rows))
    assert {row["arch"] for row in rows} == compiled.SHARED.keys()
    assert all(row["registers"] > 0 and row["shared"] > 0 and row["tensor_cores"] for row in rows)


@pytest.mark.slow
def test_torch_compile_traces_the_kernels() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    words = [sys.executable, "-c", TRACE, str(TOOLS)]  # a process, since interpreted kernels cannot be traced
    done = subprocess.run(words, capture_output=True, text=True, env=environment)
    assert done.stdout.strip() == "12", done.stdout + done.stderr  # 4 forward, 8 backward


def test_configurations_cover_all_kernels(compiled: ModuleType) -> None:
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
def test_exceeded_limit_is_a_failure(compiled: ModuleType, reported: dict[str, Any], failure: str) -> None:
    row = {"kernel": "tile_outputs", "features": 64, "values": 64, "dtype": "bfloat16", "arch": 89, "error": None}
    row |= {"shared": 1024, "spills": 0, "tensor_cores": {"mma": 4}, "seconds": 1.0}
    assert compiled.failures_of(row) == []
    [told] = compiled.failures_of(row | reported)
    assert told.startswith("tile_outputs 64 x 64 bfloat16 sm_") and told.endswith(failure)
