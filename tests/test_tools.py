"""The tools explain themselves, and run."""

import os
import runpy
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest

TOOLS = Path(__file__).parents[1] / "tools"


SCRIPTS = sorted(
    str(path.relative_to(TOOLS)) for folder in (".", "experiments") for path in (TOOLS / folder).glob("*.py")
)


@pytest.mark.parametrize("tool", ["baseline", "compare", "gpu_ready", "gpu_report", "release", *SCRIPTS])
def test_help(tool: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", [str(TOOLS / tool), "--help"])
    monkeypatch.syspath_prepend(str(TOOLS))
    # a tool may change the environment of its process
    with patch.dict(os.environ), pytest.raises(SystemExit) as left:
        runpy.run_path(str(TOOLS / tool), run_name="__main__")
    assert not left.value.code and capsys.readouterr().out.startswith(f"usage: {Path(tool).name}")


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        "fuzz.py all --cases 2 --seed 1",
        "show_linformer_leak.py",
        "soak_kill.py --only plain --kills 1",
    ],
)
def test_a_tool_runs(tmp_path: Path, command: str) -> None:
    environment = {**os.environ, "LMLONG_CACHE": str(tmp_path / "cache")}
    words = [sys.executable, str(TOOLS / command.split()[0]), *command.split()[1:]]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert done.returncode == 0 and done.stdout, done.stdout + done.stderr
