"""The demonstration of docs/guides/encoders.md, by the command that the page gives."""

import re
import runpy
import shlex
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "guides" / "encoders.md").read_text(encoding="utf-8")


def test_masked_linformer_leaks_and_linear_attention_does_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (command,) = re.findall(r"```sh\n(python .*?)\n```", PAGE)
    python, script, *arguments = shlex.split(command)
    assert python == "python"
    monkeypatch.setattr("sys.argv", [script, *arguments])
    runpy.run_path(str(ROOT / script), run_name="__main__")
    output = capsys.readouterr().out
    changes = {
        name: float(re.search(rf"^{name} +(\S+)$", output, re.MULTILINE)[1])  # type: ignore[index]
        for name in ("masked Linformer", "causal linear attention")
    }
    assert changes["masked Linformer"] > 0.01
    assert changes["causal linear attention"] == 0.0
    assert all(name in PAGE for name in [*changes, output.splitlines()[0]])
