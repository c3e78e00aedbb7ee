"""The tools explain themselves, and begin nothing when they are asked to."""

import runpy
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[1] / "tools"


@pytest.mark.parametrize("tool", ["baseline", "gpu_report", *sorted(path.name for path in TOOLS.glob("*.py"))])
def test_help(tool: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", [str(TOOLS / tool), "--help"])
    monkeypatch.syspath_prepend(str(TOOLS))
    with pytest.raises(SystemExit) as left:
        runpy.run_path(str(TOOLS / tool), run_name="__main__")
    assert not left.value.code and capsys.readouterr().out.startswith(f"usage: {tool}")
