"""A plug-in goes through every command: checked, trained, interrupted, resumed, measured and compared."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from lmlong.attention.plugins import load_plugin, unload_plugin
from lmlong.checkpoint import read
from lmlong.recipe import file as recipe_file
from lmlong.training.dry_run import dry_run

from .conftest import TWO_GATES, Command

PLUGIN = ("--plugin", "two_gates.py")


@pytest.fixture
def done(lmlong: Command) -> Callable[..., str]:
    """What a command prints that must succeed."""

    def run(*words: str) -> str:
        result = lmlong(*words)
        assert result.returncode == 0, result.stderr
        return result.stdout

    return run


@pytest.fixture
def run(place: Path, done: Callable[..., str]) -> Path:
    """A run that was stopped after its first half, and resumed with the plug-in of the command line."""
    run = place / "runs" / "gates"
    if not run.exists():
        assert "two_gates, linear attention" in done("recipe", "check", "gates.yaml")
        done("train", "gates.yaml", "training.steps=4", "training.schedule=constant")
        options = ("training.schedule=constant", "training.steps=6")
        done("train", "bare.yaml", "name=gates", *options, *PLUGIN, "--resume", "auto")
    return run


def test_commands_need_the_plugin_by_name(lmlong: Command, done: Callable[..., str], place: Path, run: Path) -> None:
    assert read.find(run).name == "step-00000006"
    refused = lmlong("generate", "gates", "--prompt", "once")
    assert refused.returncode == 4 and "Traceback" not in refused.stderr
    message = "needs the attention two_gates of the plug-in two_gates.py: load it by --plugin FILE, or in"
    assert message in refused.stderr
    assert len(done("generate", "gates", "--prompt", "once", "--max-tokens", "9", *PLUGIN)) > 3
    assert "all laws kept" in done("check", "gates", *PLUGIN)
    about = json.loads(done("info", "gates", "--json", *PLUGIN))
    assert about["attention by layer"] == ["two_gates", "linear"]
    assert about["plug-ins"] == [str(place / "two_gates.py")]


def test_checkpoint_imports_no_file(lmlong: Command, done: Callable[..., str], place: Path) -> None:
    """Its plug-in runs when the user names it, and only then."""
    trap = place / "trap.py"
    trap.write_text(f"open({str(place / 'sprung')!r}, 'w').close()\n{TWO_GATES.read_text()}")
    done("train", "bare.yaml", "--plugin", "trap.py", "--out", "runs/trap", "training.steps=1")
    (place / "sprung").unlink()
    for words in (["generate", "runs/trap"], ["info", "runs/trap"]):
        refused = lmlong(*words)
        assert refused.returncode == 4 and "of the plug-in trap.py: load it by --plugin" in refused.stderr
    done("info", "runs/trap", *PLUGIN)  # the user's own file of the same attention
    assert not (place / "sprung").exists()


@pytest.mark.slow
def test_dry_run_has_the_plugin(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LMLONG_CACHE", str(place / "cache"))
    monkeypatch.chdir(place)
    chosen = recipe_file.load("gates.yaml", (), load_plugin)
    assert dry_run(chosen).length == 32
    unload_plugin(place / "two_gates.py")


def test_benchmarks_have_the_plugin(done: Callable[..., str]) -> None:
    shape = ("quickstart", "model.heads=1", "model.width=8", "--lengths", "16", "--precisions", "32")
    assert "two_gates" in done("bench", "attention", *shape, *PLUGIN, "--only", "softmax,two_gates")


def test_check_finds_a_broken_plugin(lmlong: Command, done: Callable[..., str], place: Path) -> None:
    assert "two_gates.py: TwoGates" in done("check", *PLUGIN)
    (place / "broken.py").write_text(TWO_GATES.read_text().replace("return (weights * ", "return 2 * (weights * "))
    refused = lmlong("check", "--plugin", "broken.py")
    assert refused.returncode == 1 and "laws broken by broken.py: TwoGates" in refused.stdout
    (report,) = json.loads(lmlong("check", "--plugin", "broken.py", "--json").stdout)
    assert [law["number"] for law in report["laws"] if not law["kept"]] == [1]
