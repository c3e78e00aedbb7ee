"""A distribution is installed in an environment without a compiler, and trains and generates there."""

import json
import os
import re
import venv
from collections.abc import Iterator, Sequence
from pathlib import Path

from lmlong.errors import LmlongError

from .distributions import run

TRAIN = (
    *("train", "quickstart", "--out", "run", "training.steps=5", "text.sequence_length=64", "training.batch_size=1"),
    *("model.width=32", "model.layers=2", "training.validation_tokens=2000", "training.final_validation_tokens=0"),
    *("text.sources=[{kind: files, paths: [text.txt]}]", "text.validation.fraction=0.5"),
)
COMPILERS = re.compile(r"(.*-)?(cc|c[89]9|c\+\+|cpp|gcc|g\+\+|clang|clang\+\+|nvcc|ld|as)(-[\d.]+)?")
"""Names of programs that the environment lacks."""
GENERATE = ("generate", "run", "--prompt", "a", "--max-tokens", "20", "--stats")


class Environment:
    """A virtual environment with torch, from which no compiler is on PATH."""

    def __init__(self, folder: Path, torch: str):
        self.folder = folder
        venv.create(folder / "venv", with_pip=True)
        self.bin = folder / "venv" / "bin"
        keep = {name: value for name, value in os.environ.items() if not name.startswith(("LMLONG", "PYTHON", "CXX"))}
        path = f"{self.bin}{os.pathsep}{link_programs(folder / 'programs')}"
        self.variables = {**keep, "PATH": path, "LMLONG_CACHE": str(folder / "cache")}
        self._run("python", "-m", "pip", "install", "--quiet", torch)

    def install(self, distribution: Path) -> None:
        """Install a distribution in place of the one before, and its dependencies."""
        self._run("python", "-m", "pip", "install", "--quiet", str(distribution))
        self._run("python", "-m", "pip", "install", "--quiet", "--no-deps", "--force-reinstall", str(distribution))

    def check(self, native: str | None) -> Iterator[str]:
        """Train and generate. Yield what was done; raise LmlongError unless this native code runs."""
        (self.folder / "text.txt").write_text("It was a dark and stormy night. " * 2000)
        facts = json.loads(self._run("lmlong", "info", "--json"))
        if facts["native code"] != native or facts["C++ compiler"]:
            raise LmlongError(f"native code is {facts['native code']} in an environment where it should be {native}.")
        yield f"native code: {native or 'none'}"
        self._run("lmlong", *TRAIN, "--overwrite")
        self._run("lmlong", *GENERATE)
        yield "trained and generated"

    def _run(self, program: str, *words: str) -> str:
        return run(str(self.bin / program), *words, env=self.variables, cwd=self.folder)


def link_programs(folder: Path) -> Path:
    """Return a folder with links to all programs of this machine but compilers: setup.py of DeepSpeed calls bash."""
    folder.mkdir()
    for each in map(Path, os.environ["PATH"].split(os.pathsep)):
        for program in each.iterdir() if each.is_dir() else ():
            link = folder / program.name
            excluded = COMPILERS.fullmatch(program.name) or program.name.startswith(("python", "pip"))
            if not excluded and not os.path.lexists(link):
                link.symlink_to(program.resolve())
    return folder


def check_all(folder: Path, torch: str, distributions: Sequence[tuple[Path, str | None]]) -> Iterator[str]:
    """Install distributions one after the other, each with the native code that must run. Yield what was done."""
    environment = Environment(folder, torch)
    for distribution, native in distributions:
        environment.install(distribution)
        for line in environment.check(native):
            yield f"{distribution.name}: {line}"
