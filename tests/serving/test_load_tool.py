"""tools/load_serve.py finds a server of a tiny model in order, and one that is not so."""

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
from interop.exported import write_run

TOOLS = Path(__file__).parents[2] / "tools"

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="only Linux tells of other processes")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    write_run(folder)
    return folder


def load(run: Path, monkeypatch: pytest.MonkeyPatch, command: str) -> tuple[int, dict[str, float], list[str]]:
    """Return the exit code of a command of the tool, its figures by name, and what it found wrong."""
    name, *words = command.split()
    told = run.parent / "told.json"
    monkeypatch.setattr(sys, "argv", ["load_serve.py", name, str(run), *words, "--json", str(told)])
    monkeypatch.syspath_prepend(str(TOOLS))
    with pytest.raises(SystemExit) as left:
        runpy.run_path(str(TOOLS / "load_serve.py"), run_name="__main__")
    body: dict[str, Any] = json.loads(told.read_text())
    figures = {figure["name"]: figure["value"] for figure in body["figures"]}
    assert isinstance(left.value.code, int) and body["command"] == name
    return left.value.code, figures, body["wrong"]


def test_a_long_prompt_beside_streams(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, figures, wrong = load(run, monkeypatch, "prompt --streams 3 --bytes 50000 --before 0.5")
    assert (code, wrong) == (0, [])
    assert figures["tokens of the long prompt"] == 50_000
    assert figures["longest pause of a stream meanwhile"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "figure"),
    [
        ("streams --streams 12 --rows 4 --tokens 20", "of lmlong generate"),
        ("vanish --clients 12 --rounds 2 --longest 1", "texts that were given up"),
        ("prefix --prompts 30 --longest 400 --tokens 6", "tokens not read again"),
        ("malformed --requests 150 --silent 0", "requests answered by 400"),
        ("sessions --sessions 30 --memory 100k --wake 5", "first token of a session that slept, median"),
        ("kill --kills 1 --longest 3", "sessions compared by their next tokens"),
    ],
)
def test_the_other_commands(run: Path, monkeypatch: pytest.MonkeyPatch, command: str, figure: str) -> None:
    code, figures, wrong = load(run, monkeypatch, command)
    assert (code, wrong) == (0, []) and figures[figure] > 0
