"""The demonstration of docs/reference/why-linformer-is-not-causal.md, run by the command that the page gives."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs" / "reference" / "why-linformer-is-not-causal.md").read_text(encoding="utf-8")


def test_masked_linformer_leaks_and_linear_attention_does_not() -> None:
    (command,) = re.findall(r"```sh\n(.*?)\n```", PAGE)
    python, *arguments = shlex.split(command)
    assert python == "python"
    result = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr
    changes = {
        name: float(re.search(rf"^{name} +(\S+)$", result.stdout, re.MULTILINE)[1])  # type: ignore[index]
        for name in ("masked Linformer", "causal linear attention")
    }
    assert changes["masked Linformer"] > 0.01
    assert changes["causal linear attention"] == 0.0
    assert all(name in PAGE for name in [*changes, result.stdout.splitlines()[0]])
