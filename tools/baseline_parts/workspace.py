"""The folder in which cases are measured: a text, a recipe, and runs that several cases read."""

import io
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lmlong

Options = Mapping[str, Any]
"""Values of a recipe by their key.path."""

RECIPE = Path(__file__).with_name("recipe.yaml")


class Workspace:
    """A folder with the text; runs are trained in it when a case first reads them."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.text = folder / "text.jsonl"
        self.text.write_text("".join(json.dumps({"text": document}) + "\n" for document in documents()))
        self._runs: dict[str, Path] = {}

    def options(self, options: Options) -> dict[str, Any]:
        """Return the options with the text of this folder."""
        return {"text.sources": [{"kind": "files", "paths": [str(self.text)]}], **options}

    def recipe(self, options: Options) -> lmlong.Recipe:
        return lmlong.Recipe.load(RECIPE, self.options(options))

    def train(self, name: str, options: Options, **how: Any) -> Path:
        """Train into the folder of this name and return it."""
        with silence():
            lmlong.train(self.recipe(options), self.folder / name, **how)
        return self.folder / name

    def run_of(self, name: str, options: Options) -> Path:
        """Return the run of this name, trained at its first use."""
        if name not in self._runs:
            self._runs[name] = self.train(f"run {name}", options)
        return self._runs[name]

    def words(self, options: Options) -> list[str]:
        """Return the options as words of a command line."""
        return [f"{key}={json.dumps(value)}" for key, value in self.options(options).items()]

    def command(self, *words: str) -> str:
        """Run a command of lmlong in a process of its own, by one thread, and return its standard output."""
        command, one = [sys.executable, "-m", "lmlong", *words], {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        environment = {**os.environ, **one}
        done = subprocess.run(command, cwd=self.folder, capture_output=True, text=True, timeout=300, env=environment)
        if done.returncode:
            raise RuntimeError(f"lmlong {' '.join(words)}: exit code {done.returncode}\n{done.stderr}")
        return done.stdout


def documents() -> Iterator[str]:
    """Iterate over documents of drawn words, from a few words to some hundred."""
    draw = random.Random(0)
    words = ["".join(draw.choices("etaoinshrdlu", k=draw.randint(1, 9))) for _ in range(200)]
    for _ in range(80):
        yield " ".join(draw.choices(words, k=draw.choice([4, 12, 40, 150])))


@contextmanager
def workspace() -> Iterator[Workspace]:
    """Make a workspace whose caches are empty, but for compiled code, whose name is a hash of all it is made of."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        usual = Path(os.environ.get("LMLONG_CACHE") or Path.home() / ".cache" / "lmlong")
        (usual / "native").mkdir(0o700, parents=True, exist_ok=True)
        (folder / "cache").mkdir(0o700)
        (folder / "cache" / "native").symlink_to(usual / "native", target_is_directory=True)
        with patch.dict(os.environ, LMLONG_CACHE=str(folder / "cache"), HF_MODULES_CACHE=str(folder / "modules")):
            yield Workspace(folder)


@contextmanager
def silence() -> Iterator[None]:
    """Drop what is printed."""
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        yield
