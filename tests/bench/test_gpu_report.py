"""The report of a GPU in tiny sizes on a CPU: what its page and figures say, and what they say when something fails."""

import json
import os
import re
import sys
import time
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from machine import needs_compiler, needs_triton

from lmlong.attention.linear.triton import TritonLinear

TOOLS = Path(__file__).resolve().parents[2] / "tools"
LINEAR = {"elu", "elu-learned", "elu-channel", "favor", "favor-learned"}


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The tool as a module. The variables that it sets are restored afterwards."""
    monkeypatch.syspath_prepend(TOOLS)
    for name in ("TRITON_INTERPRET", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, os.environ.get(name, ""))
    spec = spec_from_loader("gpu_report", SourceFileLoader("gpu_report", str(TOOLS / "gpu_report")))
    assert spec and spec.loader
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def run(tool: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Run the tool, whose parts are processes, and return its exit code."""

    def run(*words: str) -> int:
        monkeypatch.setattr(sys, "argv", ["gpu_report", *words])
        return tool.main()

    return run


def results(folder: Path) -> tuple[str, dict[str, Any]]:
    return (folder / "report.md").read_text(), json.loads((folder / "report.json").read_text())


def cells(page: str, title: str) -> list[list[str]]:
    """Return the rows of the first table below a heading, the titles among them."""
    block = re.search(rf"^#+ {re.escape(title)}.*?^```\n(.*?)^```", page, flags=re.DOTALL | re.MULTILINE)
    assert block, title
    return [re.split(r"  +", line.strip()) for line in block[1].splitlines()]


def check_speeds(speeds: list[dict[str, Any]], names: set[str], page: str, title: str) -> None:
    """The ratios are those of the speeds, these those of the seconds, and the page shows them."""
    assert {one["name"] for one in speeds} == names
    shown = {(row[0], row[1]): row for row in cells(page, title)[1:]}
    assert len(shown) == len(speeds)
    for one in speeds:
        seconds = sorted(one["seconds"])[len(one["seconds"]) // 2]
        assert one["tokens_per_second"] == pytest.approx(one["tokens"] / seconds)
        assert one["peak"] > 0
        (usual,) = [other for other in speeds if (other["name"], other["length"]) == ("softmax", one["length"])]
        assert one["ratio"] == pytest.approx(one["tokens_per_second"] / usual["tokens_per_second"])
        row = shown[f"{one['length']:,}", one["name"]]
        assert float(row[2].replace(",", "")) == pytest.approx(seconds * 1e3, rel=0.02, abs=0.01)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_does_nothing(
    tmp_path: Path, run: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--out", str(tmp_path / "report")) == 2
    assert "finds no NVIDIA GPU here; --tiny tries the tool on a CPU" in capsys.readouterr().err
    assert not (tmp_path / "report").exists()


def test_a_part_that_fails_is_told_and_does_not_stop_the_others(
    tmp_path: Path, run: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "triton.py").write_text("raise ImportError('no such kernels')")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    assert run("--tiny", "--only", "check,kernels", "--out", str(tmp_path / "report")) == 1
    page, record = results(tmp_path / "report")
    assert "something failed" in page and "- elu, head_dim 16, 32: ImportError: no such kernels" in page
    assert "Traceback" in record["parts"]["Numbers"]["log"]
    names = {"softmax", "elu-learned by torch"}
    check_speeds(record["parts"]["Kernels"]["figures"]["head_dim 16, forward"]["results"], names, page, "Kernels")


def test_what_there_was_no_time_for_is_named(tmp_path: Path, run: Callable[..., int]) -> None:
    assert run("--tiny", "--only", "check,decode", "--minutes", "0", "--out", str(tmp_path)) == 0
    page, record = results(tmp_path)
    assert "nothing failed, time ran out" in page and "| Decoding | out of time, 1 left out |" in page
    assert record["parts"]["Decoding"]["left_out"] == ["all of it: no time left"]


def test_a_part_that_never_ends_is_killed(tool: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool, "GRACE", 0.0)
    begun = time.monotonic()
    found = tool.start_part("training", 0.5, tiny=True)
    assert time.monotonic() - begun < 30
    assert re.fullmatch(r"killed after \d+ s, long after its time", *found["failures"])


@needs_triton
def test_wrong_numbers_have_no_speed(tool: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    from gpu_report_parts import kernels
    from gpu_report_parts.part import TINY, Findings, Job

    right = TritonLinear.operation

    def wrong(*given: Any) -> Any:
        y, state = right(*given)
        return y * 1.1, state

    sizes = TINY._replace(lengths=(16,), checked=72)
    monkeypatch.setattr(TritonLinear, "operation", wrong)
    monkeypatch.setattr(kernels, "ATTENTIONS", ("elu",))
    job = Job(sizes, torch.device("cpu"), time.monotonic() + 60, Findings())
    monkeypatch.setattr(Findings, "save", lambda self: None)
    kernels.kernels(job)
    told = [failure for failure in job.found.failures if "WrongError: the error of y is" in failure]
    assert len(told) == len(job.found.failures) == 2  # forward, and with the backward pass
    for measured in job.found.figures.values():
        assert {one["name"] for one in measured["results"]} == {"softmax", "elu-learned by torch"}

    monkeypatch.setattr(TritonLinear, "operation", right)
    late = job._replace(deadline=time.monotonic() - 1, found=Findings())
    kernels.kernels(late)
    assert late.found.left_out[-1] == "head_dim 16, forward and backward, 16 tokens: no time left"
    assert not late.found.failures


@pytest.mark.slow
@needs_triton
@needs_compiler
def test_all_parts_end_in_a_page_and_figures(tmp_path: Path, run: Callable[..., int]) -> None:
    code = run("--tiny", "--out", str(tmp_path))
    page, record = results(tmp_path)
    assert code == 0, page
    assert "**Nothing here was measured on a GPU.**" in page and "there is no CUDA graph on a CPU" in page
    assert record["machine"]["machine"].startswith("no GPU") and record["machine"]["torch"] == torch.__version__
    titles = ["Tests", "Numbers", "Kernels", "Training", "Decoding", "DeepSpeed"]
    assert list(record["parts"]) == titles == re.findall(r"^## (.*)", page, flags=re.MULTILINE)
    assert all(f"| {title} | ok" in page for title in titles)
    numbers, speeds, training = (record["parts"][title]["figures"] for title in titles[1:4])

    assert re.search(r"Triton kernels: \d+ passed", page)
    assert {(one["attention"], one["precision"]) for one in numbers["errors"]} == {
        (name, precision) for name in LINEAR for precision in ("32", "bf16")
    }
    for one in numbers["errors"]:
        assert {"y", "dq", "dk", "dv"} <= one["triton"].keys()
        assert ("dlog_decay" in one["triton"]) == one["attention"].endswith(("learned", "channel"))
        assert 0 < max(one["triton"].values()) < (1e-5 if one["precision"] == "32" else 5e-2)
    assert {one["attention"] for one in numbers["laws"]} == LINEAR

    assert speeds.keys() == {"head_dim 16, forward", "head_dim 16, forward and backward"}
    for group, measured in speeds.items():
        assert {one["length"] for one in measured["results"]} == {64, 128}
        check_speeds(measured["results"], {"softmax", *LINEAR, "elu-learned by torch"}, page, f"{group}, 2 heads")
    names = {"softmax", "elu-learned by torch", "elu-learned by triton"}
    check_speeds(training["results"], names, page, "Training")
    names = {"softmax", "elu-learned", "elu-learned, native code"}
    check_speeds(record["parts"]["Decoding"]["figures"]["results"], names, page, "Decoding")
    losses = record["parts"]["DeepSpeed"]["figures"]["losses"]
    assert losses[-1] < losses[0] and f"from {losses[0]:.3f} to {losses[-1]:.3f}" in page
