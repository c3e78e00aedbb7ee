"""What can be known of a GPU without one: operations, memory, compiled kernels, and the report in tiny sizes."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from machine import needs_compiler, needs_fla, needs_triton
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


def run(tool: str, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a tool in a process of its own: in that of the tests, Triton interprets kernels."""
    command = [sys.executable, str(TOOLS / tool), *words]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})


@pytest.mark.slow
@needs_triton
def test_launches_of_triton_kernels_are_counted(tmp_path: Path) -> None:
    done = run("gpu_ready", "count", "--quick", "--only", "linear by Triton", "--json", str(tmp_path / "figures.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 80
    (one, several) = json.loads((tmp_path / "figures.json").read_text())["count"]["kinds"]
    assert not one["starts"] and several["starts"]
    assert sum(count for name, count in one["training"][0]["names"].items() if "triton" in name) >= 5


@pytest.mark.slow
@needs_triton
def test_the_program_is_ready_for_a_gpu() -> None:
    done = run("gpu_ready")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@needs_triton
def test_a_compiled_step_moves_less_memory(tmp_path: Path) -> None:
    """By the kernels into which torch.compile fuses it; and the parts of a step that ran on a GPU are predicted."""
    done = run("gpu_ready", "predict", "--json", str(tmp_path / "figures.json"), TRITON_DEFAULT_FP_FUSION="1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 80
    figures = json.loads((tmp_path / "figures.json").read_text())["predict"]
    before, after = figures["steps"]["plain"], figures["steps"]["kept"]
    assert sum(after.values()) < sum(before.values()) / 2
    assert after["products"] < before["products"]  # activations are not computed again
    assert {name: of for name, (of, _) in figures["blocks"].items()}["kept, forward"] < 30


def test_a_prediction_far_from_what_was_measured_is_a_failure() -> None:
    from gpu_ready_parts import predict

    measured = {part: float(time) for part, time in predict.MEASURED.items()}
    assert not predict.failures({"plain": measured, "kept": {"products": 40.0}})
    wrong = {**measured, "norms": 10.0}
    assert predict.failures({"plain": wrong, "kept": {"products": 120.0}}) == [
        "norms take 10 ms, and 14 were measured",
        "a compiled step takes 120 ms, more than 95",
    ]


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
    pytest.importorskip("triton")
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
@needs_triton
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


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_measured(tmp_path: Path) -> None:
    done = run("gpu_report", "run", str(tmp_path), PYTHONPATH="")  # before packages are installed
    assert done.returncode == 2 and "finds no NVIDIA GPU here; --tiny tries the tool on a CPU" in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@needs_triton
@needs_compiler
def test_all_parts_end_in_a_page(tmp_path: Path) -> None:
    done = run("gpu_report", "run", str(tmp_path), "--tiny", "--minutes", "20", PYTHONPATH="")
    page = (tmp_path / "report.md").read_text()
    measured = [json.loads(line) for line in (tmp_path / "figures.jsonl").read_text().splitlines()]
    assert done.returncode == 0 and "0 failed" in done.stderr, page
    assert "Not finished" not in page and "Nothing was measured." not in page
    laws = [one["cells"] for one in measured if one["part"] == "laws" and one["cells"]]
    assert {"y", "dq", "dk", "dv", "law 2", "law 7"} <= {name for cells in laws for name in cells}
    assert any("by triton" in one["row"] for one in measured if one["part"] == "laws")
    (losses,) = [one["cells"] for one in measured if one["part"] == "losses" and one["cells"]]
    assert losses["largest difference"] < 0.05 and losses["CPU, step 6"] < losses["CPU, step 1"]
