"""The report of a GPU in tiny sizes on a CPU: what its page says, what it does when something fails, how it goes on."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from machine import needs_compiler, needs_triton

TOOL = Path(__file__).resolve().parents[2] / "tools" / "gpu_report"


def run(*words: str, path: str = "") -> subprocess.CompletedProcess[str]:
    """Run the tool as a program: it starts its parts as programs, and runs before packages are installed."""
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.run([sys.executable, str(TOOL), *words], capture_output=True, text=True, env=environment)


def results(folder: Path) -> tuple[str, list[dict[str, Any]]]:
    lines = (folder / "figures.jsonl").read_text().splitlines()
    return (folder / "report.md").read_text(), [json.loads(line) for line in lines]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_measured(tmp_path: Path) -> None:
    done = run("run", str(tmp_path))
    assert done.returncode == 2 and "finds no NVIDIA GPU here; --tiny tries the tool on a CPU" in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@needs_triton
@needs_compiler
def test_all_parts_end_in_a_page(tmp_path: Path) -> None:
    done = run("run", str(tmp_path), "--tiny", "--minutes", "20")
    page, measured = results(tmp_path)
    assert done.returncode == 0 and "0 failed" in done.stderr, page
    assert "Not finished" not in page and "Nothing was measured." not in page
    laws = [one["cells"] for one in measured if one["part"] == "laws" and one["cells"]]
    assert {"y", "dq", "dk", "dv", "law 2", "law 7"} <= {name for cells in laws for name in cells}
    assert any("by triton" in one["row"] for one in measured if one["part"] == "laws")
    (losses,) = [one["cells"] for one in measured if one["part"] == "losses" and one["cells"]]
    assert losses["largest difference"] < 0.05 and losses["CPU, step 6"] < losses["CPU, step 1"]
