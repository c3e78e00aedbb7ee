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


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    write_run(folder)
    return folder


def load(run: Path, monkeypatch: pytest.MonkeyPatch, command: str) -> tuple[int, dict[str, float], list[str]]:
    """Return the exit code of a command of the tool, its figures by name, and the faults."""
    name, *words = command.split()
    told = run.parent / "told.json"
    monkeypatch.setattr(sys, "argv", ["load_serve.py", name, str(run), *words, "--json", str(told)])
    monkeypatch.syspath_prepend(str(TOOLS))
    monkeypatch.setattr("load.server.REST", 0.2)
    with pytest.raises(SystemExit) as left:
        runpy.run_path(str(TOOLS / "load_serve.py"), run_name="__main__")
    body: dict[str, Any] = json.loads(told.read_text())
    figures = {figure["name"]: figure["value"] for figure in body["figures"]}
    assert isinstance(left.value.code, int) and body["command"] == name
    return left.value.code, figures, body["wrong"]


@pytest.mark.slow
def test_malformed_requests(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, figures, wrong = load(run, monkeypatch, "malformed --requests 150 --silent 0")
    assert (code, wrong) == (0, [])
    answers = {name: count for name, count in figures.items() if " answered by " in name}
    assert sum(answers.values()) == 150 and answers["requests answered by 400"] > 50


@pytest.mark.slow
def test_a_server_that_is_killed(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, figures, wrong = load(run, monkeypatch, "kill --kills 1 --longest 3")
    assert (code, wrong) == (0, [])
    assert figures["kills"] == 1 and figures["sessions compared by their next tokens"] > 0
