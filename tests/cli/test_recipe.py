"""`lmlong recipe`: list, show, check and copy recipes, and explain their options."""

import json
from pathlib import Path

import pytest
from commands import Finished, lmlong

from lmlong.recipe.file import load, recipe_class
from lmlong.recipe.find import shipped_recipes
from lmlong.recipe.reference import reference


def recipe(*words: str, cwd: Path | None = None) -> Finished:
    return lmlong("recipe", *words, cwd=cwd)


def test_check_summarizes_the_model() -> None:
    changes = ["text.sequence_length=512", "model.attention.kind=[linear, softmax]", "training.tokens=9000"]
    done = recipe("check", "quickstart", "training.steps=20", "model.width=60", "model.layers=2", *changes)
    summary = "2 layers of width 60, linear, softmax attention, sequences of 512 tokens, 20 steps or 9000 tokens"
    assert done == (0, f"ok: quickstart: {summary}\n", "")
    window = "model.attention.parallel_window=64"
    assert "linear attention beside windows of 64 tokens," in recipe("check", "book", window).stdout


def test_check_names_missing_files(tmp_path: Path) -> None:
    (tmp_path / "here.txt").write_text("text")
    gone = tmp_path / "gone.txt"
    paths = f"text.sources.0.paths={tmp_path / 'here.txt'},{gone},{tmp_path}/*.md,hf://datasets/a/b/c.txt"
    done = recipe("check", "book", paths)
    assert (done.returncode, done.stderr) == (0, f"not on this machine: {gone}\n")
    settings = ["training.strategy=deepspeed", "training.deepspeed.config=gone.json", "training.teacher=runs/gone"]
    done = recipe("check", "quickstart", *settings, cwd=tmp_path)
    assert done.returncode == 0 and done.stderr.startswith("not on this machine: runs/gone\ntraining.")
    assert "gone.json: No such file" in done.stderr or "deepspeed is not installed" in done.stderr


def test_list_shows_name_description_and_command() -> None:
    lines = recipe("list").stdout.splitlines()
    assert [line for line in lines if not line.startswith(" ")] == list(shipped_recipes())
    assert lines[lines.index("quickstart") + 1].startswith("    A small model of Python source")
    assert "    $ lmlong train quickstart" in lines


def test_show_prints_the_file_or_every_key(tmp_path: Path) -> None:
    assert recipe("show", "quickstart").stdout == shipped_recipes()["quickstart"].read_text()
    shown = tmp_path / "shown.yaml"
    shown.write_text(recipe("show", "quickstart", "--resolved").stdout)
    assert load(str(shown)) == load("quickstart")
    assert "  weight_decay: 0.1\n" in shown.read_text()


def test_copy_names_the_copy(tmp_path: Path) -> None:
    original = shipped_recipes()["quickstart"].read_bytes()
    for target, name in (("books.yaml", "books.yaml"), (".", "quickstart.yaml")):
        assert recipe("copy", "quickstart", target, cwd=tmp_path) == (0, f"{name}\n", "")
        assert (tmp_path / name).read_bytes() == original


def test_options_show_type_default_and_meaning() -> None:
    text = recipe("options").stdout
    assert max(map(len, text.splitlines())) <= 80
    meaning = "Size of a token's vector between blocks."
    assert f"model.width\n    a whole number, above 0; default 256\n    {meaning}\n" in text
    assert "text.sources.N.dataset  (kind: hub)\n    text; required\n" in text
    assert json.loads(recipe("options", "--json").stdout) == [row._asdict() for row in reference(recipe_class())]


def test_options_are_searched() -> None:
    def keys(*words: str) -> list[str]:
        return [line for line in recipe("options", *words).stdout.splitlines() if line[:1].strip()]

    assert keys("decay", "share") == ["training.decay_fraction", "training.final_learning_rate"]
    for words in (["context", "length"], ["block_size"]):
        assert keys(*words)[0] == "text.sequence_length"
    assert keys("lr")[0] == "training.learning_rate"
    section = keys("training", "decay")
    assert section[0] == "training.schedule" and all(key.startswith("training.") for key in section)


@pytest.mark.parametrize("command", ["", "list", "show", "check", "copy", "options"])
def test_every_help_has_an_example(command: str) -> None:
    done = recipe(*([command] if command else []), "--help")
    assert done.returncode == 0
    assert "Example" in done.stdout and "\n    lmlong recipe" in done.stdout
