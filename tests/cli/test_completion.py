"""click's own shell completion: recipes, runs, and the keys of a recipe with their words."""

from pathlib import Path

import pytest
from commands import lmlong

from lmlong.cli import main as cli


@pytest.fixture(autouse=True)
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("first", "second"):
        (tmp_path / "runs" / name / "checkpoints").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        (["tra"], {"train"}),
        (["nonsense", ""], set(cli.COMMANDS)),
        (["train", "qu"], {"quickstart"}),
        (["recipe", "show", "who"], {"whole-book"}),
        (["train", "quickstart", "training.kern"], {"training.kernel="}),
        (["train", "quickstart", "text.sources.0.pa"], {"text.sources.0.paths="}),
        (["train", "quickstart", "training.kernel=t"], {"training.kernel=torch", "training.kernel=triton"}),
        (["train", "quickstart", "training.kernel", "=", "t"], {"torch", "triton"}),  # as bash cuts it
        (["train", "quickstart", "training.compile", "="], {"true", "false"}),
        (
            ["train", "quickstart", "training.steps=1", "model.hea"],
            {"model.heads=", "model.head_dim=", "model.head_norm="},
        ),
        (["train", "quickstart", "training.steps=1"], set()),
        (["generate", ""], {"runs/first", "runs/second"}),
        (["generate", "se"], {"second"}),
        (["eval", "runs/first", "runs/s"], {"runs/second"}),
    ],
)
def test_what_a_shell_offers(line: list[str], offered: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_LMLONG_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", " ".join(["lmlong", *line]))
    monkeypatch.setenv("COMP_CWORD", str(len(line)))
    done = lmlong()
    lines = [line.partition(",") for line in done.stdout.splitlines()]
    assert done.returncode == 0
    assert {value for kind, _, value in lines if kind == "plain"} == offered


def test_the_script_for_a_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_LMLONG_COMPLETE", "zsh_source")
    done = lmlong()
    assert done.returncode == 0 and "#compdef lmlong" in done.stdout
