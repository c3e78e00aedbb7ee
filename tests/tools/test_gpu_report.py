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
def test_without_a_gpu_it_says_so_and_measures_nothing(tmp_path: Path) -> None:
    done = run("run", str(tmp_path))
    assert done.returncode == 2 and "finds no NVIDIA GPU here; --tiny tries the tool on a CPU" in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_run_goes_on_where_the_last_one_stopped(tmp_path: Path) -> None:
    done = run("run", str(tmp_path), "--tiny", "--only", "decoding", "--minutes", "0")
    assert done.returncode == 0 and "0 failed, no time for all of decoding: run it again" in done.stderr
    run("run", str(tmp_path), "--tiny", "--only", "decoding")
    page, measured = results(tmp_path)
    assert "**Nothing here was measured on a GPU.**" in page and "| elu-learned by torch's operations |" in page
    cells = {one["row"]: one["cells"] for one in measured if one["cells"]}
    assert len(cells) >= 3 and all(one["tokens/s"] > 0 for one in cells.values())
    run("run", str(tmp_path), "--tiny", "--only", "decoding")
    assert results(tmp_path)[1] == measured


@needs_triton
@pytest.mark.slow
def test_a_kernel_that_fails_or_does_not_end_leaves_the_others(tmp_path: Path) -> None:
    """Triton cannot be imported: its kernels fail. No decoding ends in a hundredth of a second."""
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "triton.py").write_text("raise ImportError('no such kernels')")
    out = tmp_path / "report"
    done = run("run", str(out), "--tiny", "--only", "training", path=str(tmp_path / "broken"))
    page, _ = results(out)
    assert (
        done.returncode == 1
        and "kernel triton, 96 tokens, training.activation_checkpointing=false : ImportError: no such kernels" in page
    )
    assert "| elu-learned, kernel torch, 96 tokens |" in page
    done = run("run", str(out), "--tiny", "--only", "losses", "--seconds", "0.01")
    assert done.returncode == 1 and "- linear and delta layers : took more than 0.01 s" in results(out)[0]


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
