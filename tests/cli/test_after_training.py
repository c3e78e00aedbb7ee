"""What a training run ends with: commands to try next, which work as they are printed."""

import shlex
from pathlib import Path

import pytest

from lmlong.attention.plugins import load_plugin, unload_plugin
from lmlong.cli.after_training import next_commands, under_next
from lmlong.recipe import file as recipe_file

TWO_GATES = Path(__file__).parents[1] / "plugins" / "two_gates.py"


@pytest.mark.parametrize(
    ("name", "overrides", "commands"),
    [
        ("quickstart", (), ["lmlong generate runs/new", "lmlong eval runs/new"]),
        ("masked", (), ["lmlong eval runs/new"]),
        ("logs", (), ["lmlong score runs/new app.log --above 8", "lmlong eval runs/new"]),
        (
            "logs",
            ("text.sources.0.paths=a b.log",),
            ["lmlong score runs/new 'a b.log' --above 8", "lmlong eval runs/new"],
        ),
    ],
)
def test_what_to_try_next_depends_on_the_recipe(name: str, overrides: tuple[str, ...], commands: list[str]) -> None:
    assert next_commands(Path("runs/new"), recipe_file.load(name, overrides)) == commands


def test_what_to_try_next_names_the_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without which no command reads the run."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "two gates.py").write_text(TWO_GATES.read_text())
    load_plugin("two gates.py")
    try:
        recipe = recipe_file.load("quickstart", ["model.attention.kind=two_gates"], load_plugin)
        commands = next_commands(Path("runs/new"), recipe)
    finally:
        unload_plugin("two gates.py")
    plugin = ["--plugin", "two gates.py"]
    assert [shlex.split(command)[2:] for command in commands] == [["runs/new", *plugin]] * 2
    assert under_next(commands).splitlines() == ["next:", *(f"  {command}" for command in commands)]
