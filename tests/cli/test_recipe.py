"""`lmlong recipe`, run as a user runs it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import lmlong
from lmlong.recipe.file import load, recipe_class
from lmlong.recipe.parsed import shipped_recipes
from lmlong.recipe.reference import reference

# The package is found from every folder, installed or not.
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(lmlong.__file__).parents[1])}


def run(*words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """The finished process of one command."""
    command = [sys.executable, "-m", "lmlong", *words]
    return subprocess.run(command, capture_output=True, encoding="utf-8", timeout=60, cwd=cwd, env=ENVIRONMENT)


def test_three_mistakes_are_three_lines(tmp_path: Path) -> None:
    (tmp_path / "books.yaml").write_text("model:\n  widht: 128\n  heads: no\n\ntraining:\n  steps: 10\n  beta1: 1\n")
    done = run("recipe", "check", "books.yaml", cwd=tmp_path)
    assert done.stderr.splitlines() == [
        "error: 3 mistakes",
        "books.yaml:2: model.widht: unknown key. Did you mean 'width'?",
        "books.yaml:3: model.heads: expected a whole number, above 0, got 'no'.",
        "books.yaml:7: training.beta1: expected a number, at least 0, below 1, got 1.",
    ]
    assert (done.returncode, done.stdout) == (2, "")


def test_check_says_what_would_be_trained() -> None:
    changes = ["text.sequence_length=512", "model.attention.kind=[linear, softmax]", "training.tokens=9000"]
    done = run("recipe", "check", "quickstart", "training.steps=20", "model.width=64", "model.layers=2", *changes)
    assert done.stdout == (
        "ok: quickstart: 2 layers of width 64, linear, softmax attention, "
        "sequences of 512 tokens, 20 steps or 9000 tokens\n"
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_check_refuses_a_mistyped_override() -> None:
    done = run("recipe", "check", "quickstart", "training.stpes=20")
    assert done.stderr == "error: training.stpes=20: unknown key. Did you mean 'steps'?\n"
    assert done.returncode == 2


def test_list_shows_name_description_and_command() -> None:
    lines = run("recipe", "list").stdout.splitlines()
    assert [line for line in lines if not line.startswith(" ")] == list(shipped_recipes())
    assert lines[lines.index("quickstart") + 1].startswith("    A small model of Python source")
    assert "    $ lmlong train quickstart" in lines


def test_show_prints_the_file_as_written() -> None:
    assert run("recipe", "show", "quickstart").stdout == shipped_recipes()["quickstart"].read_text()


def test_show_resolved_is_the_recipe_with_every_key(tmp_path: Path) -> None:
    shown = tmp_path / "shown.yaml"
    shown.write_text(run("recipe", "show", "quickstart", "--resolved").stdout)
    assert load(str(shown)) == load("quickstart")
    assert "  weight_decay: 0.1\n" in shown.read_text()


def test_copy_to_a_file_and_into_a_folder_but_never_over_one(tmp_path: Path) -> None:
    original = shipped_recipes()["quickstart"].read_bytes()
    done = run("recipe", "copy", "quickstart", "books.yaml", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "books.yaml\n")
    assert (tmp_path / "books.yaml").read_bytes() == original
    assert run("recipe", "copy", "quickstart", ".", cwd=tmp_path).stdout == "quickstart.yaml\n"
    assert (tmp_path / "quickstart.yaml").read_bytes() == original

    (tmp_path / "books.yaml").write_text("mine")
    again = run("recipe", "copy", "quickstart", "books.yaml", cwd=tmp_path)
    assert again.stderr == "error: books.yaml: exists already. Use another name, or remove it first.\n"
    assert again.returncode == 2
    assert (tmp_path / "books.yaml").read_text() == "mine"


def test_copy_into_a_folder_that_is_not_there(tmp_path: Path) -> None:
    done = run("recipe", "copy", "quickstart", "no/books.yaml", cwd=tmp_path)
    assert done.stderr == "error: no/books.yaml: cannot be written: No such file or directory.\n"
    assert done.returncode == 2


def test_options_fit_eighty_columns_and_tell_type_default_and_meaning() -> None:
    text = run("recipe", "options").stdout
    assert max(map(len, text.splitlines())) <= 80
    assert (
        "model.width\n    a whole number, above 0; default 256\n    Size of a token's vector between blocks.\n"
    ) in text
    assert "text.sources.N.dataset  (kind: hub)\n    text; required\n" in text


def test_options_that_have_a_word() -> None:
    keys = [line for line in run("recipe", "options", "decay", "share").stdout.splitlines() if line and line[0] != " "]
    assert keys == ["training.decay_fraction", "training.final_learning_rate"]
    section = [line for line in run("recipe", "options", "training", "decay").stdout.splitlines() if line[:1].strip()]
    assert section[0] == "training.schedule" and all(key.startswith("training.") for key in section)
    nothing = run("recipe", "options", "sequence_lenght")
    assert (nothing.returncode, nothing.stdout) == (2, "")
    assert "sequence_lenght: no option matches. Did you mean 'sequence_length'?" in nothing.stderr


def test_options_as_json_hold_the_whole_reference() -> None:
    rows = json.loads(run("recipe", "options", "--json").stdout)
    assert rows == [option._asdict() for option in reference(recipe_class())]


@pytest.mark.parametrize("command", ["", "list", "show", "check", "copy", "options"])
def test_every_help_has_an_example(command: str) -> None:
    words = ["recipe", *([command] if command else []), "--help"]
    done = run(*words)
    assert done.returncode == 0
    assert "Example" in done.stdout and "\n    lmlong recipe" in done.stdout
