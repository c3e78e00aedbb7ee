"""Every command and every claim of the README that can be run is run here, training shortened by overrides."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lmlong.model.build import build
from lmlong.model.language_model import parameters
from lmlong.recipe import file as recipe_file
from lmlong.text import tokenizer as tokenizers

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
SHORT = ["training.steps=3", "text.sequence_length=64", "training.batch_size=1", "model.width=32", "model.layers=2"]

BLOCKS = re.findall(r"```(\w+)\n(.*?)```", README, flags=re.DOTALL)
SHELL = [line for kind, block in BLOCKS if kind == "sh" for line in block.splitlines()]


def run(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    words = shlex.split(command)
    assert words[0] == "lmlong"
    return subprocess.run(
        [sys.executable, "-m", "lmlong", *words[1:]],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "LMLONG_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1"},
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty folder in which the README's first command was run."""
    folder = tmp_path_factory.mktemp("stranger")
    assert SHELL[0] == "pip install -e . && lmlong train quickstart"
    (folder / "my-book.txt").write_text("It was a dark and stormy night. " * 200)
    result = run(shortened(SHELL[0].split(" && ")[1]), folder)
    assert result.returncode == 0, result.stderr
    assert "gzip -9" in result.stdout
    return folder


def shortened(command: str) -> str:
    """A training command with all that makes it long overridden."""
    if not command.startswith("lmlong train"):
        return command
    keys = [option.partition("=")[0] for option in SHORT]
    return " ".join([*(word for word in command.split() if word.partition("=")[0] not in keys), *SHORT])


def commands() -> list[str]:
    """The README's commands after the first, but for those that install or test."""
    return [line for line in SHELL[1:] if line.startswith("lmlong ")]


def test_the_readme_names_commands() -> None:
    assert len(commands()) >= 6
    assert "pip install -e '.[test]' && pytest" in SHELL


def test_every_command_works(folder: Path) -> None:
    for command in commands():
        result = run(shortened(command), folder)
        assert result.returncode == 0, f"{command}: {result.stderr}"
        assert result.stdout.strip(), command
        if command.startswith("lmlong generate"):
            assert result.stderr == ""


def test_the_python_example_works(folder: Path) -> None:
    (example,) = (block for kind, block in BLOCKS if kind == "python")
    result = subprocess.run(
        [sys.executable, "-c", example], cwd=folder, capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout


def test_the_table_of_recipes_is_that_of_the_shelf() -> None:
    rows = dict(re.findall(r"^\| `([\w-]+)` \|.*?\| ([\d.]+) M \|", README, flags=re.MULTILINE))
    assert rows.keys() == recipe_file.shelf().keys()
    for name, millions in rows.items():
        recipe = recipe_file.load(name)
        with torch.device("meta"):
            model = build(recipe, recipe.text.tokenizer.vocabulary)
        assert round(parameters(model) / 1e6, 1) == pytest.approx(
            float(millions), abs=0.5 if "." not in millions else 0.01
        )


@pytest.mark.parametrize("name", recipe_file.shelf())
def test_every_recipe_says_how_it_is_run_and_builds(name: str) -> None:
    first = recipe_file.shelf()[name].read_text().splitlines()[0]
    assert first.startswith(f"# lmlong train {name}")
    overrides = [word for word in shlex.split(first)[4:] if "=" in word]
    recipe = recipe_file.load(name, overrides)
    small = recipe.model.model_copy(update={"width": 2 * recipe.model.heads, "positions": "none"})
    model = build(recipe.model_copy(update={"model": small}), 300)
    nats, _ = model.lose(torch.arange(40)[None], torch.arange(1, 41)[None], None, None, None)
    assert nats.item() / 40 == pytest.approx(5.7, abs=0.5)  # ln 300: it has learned nothing yet


def test_the_tokenizer_of_the_quickstart_is_lossless(folder: Path) -> None:
    tokenizer = tokenizers.load(folder / "runs" / "quickstart" / "tokenizer.model")
    text = (ROOT / "README.md").read_text() + "\x00\u2581 \t\r\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text
