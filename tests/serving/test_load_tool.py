"""The load tests of tools/load_serve.py against a server of a tiny model."""

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
from models import write_run

TOOLS = Path(__file__).parents[2] / "tools"

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "kills", "answers", "figure", "least"),
    [
        ("malformed --requests 150 --silent 0", None, 150, "requests answered by 400", 51),
        ("kill --kills 1 --longest 3", 1, 0, "sessions compared by their next tokens", 1),
    ],
)
def test_a_server_withstands(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    kills: int | None,
    answers: int,
    figure: str,
    least: int,
) -> None:
    run, told, (name, *words) = tmp_path / "tiny", tmp_path / "told.json", command.split()
    write_run(run)
    monkeypatch.setattr(sys, "argv", ["load_serve.py", name, str(run), *words, "--json", str(told)])
    monkeypatch.syspath_prepend(str(TOOLS))
    monkeypatch.setattr("load.server.REST", 0.2)
    with pytest.raises(SystemExit) as left:
        runpy.run_path(str(TOOLS / "load_serve.py"), run_name="__main__")
    body: dict[str, Any] = json.loads(told.read_text())
    assert (left.value.code, body["command"], body["wrong"]) == (0, name, [])
    figures = {each["name"]: each["value"] for each in body["figures"]}
    assert figures.get("kills") == kills and figures[figure] >= least
    assert sum(count for each, count in figures.items() if " answered by " in each) == answers
