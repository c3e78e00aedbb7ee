"""Wheels and the source distribution: how they are built, and what they must contain."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Sequence
from fnmatch import fnmatch
from hashlib import sha256
from pathlib import Path

from lmlong.errors import LmlongError

from .native_code import levels_of, libraries_of

ROOT = Path(__file__).parents[2]
PREBUILT = "LMLONG_PREBUILT"
"""hatch_build.py adds this folder to a wheel."""
MAX_WHEEL = 6_000_000
"""Bytes."""
IN_SDIST = ("lmlong", "recipes", "tests", "tools", "docs")


def build(kind: str, source: Path, into: Path, prebuilt: Path | None = None) -> Path:
    """Build the sdist or a wheel of a source tree, and return it."""
    into.mkdir(parents=True, exist_ok=True)
    before = {path.name for path in into.iterdir()}
    environment = {name: value for name, value in os.environ.items() if name != PREBUILT}
    if prebuilt is not None:
        environment[PREBUILT] = str(prebuilt.resolve())
    run(sys.executable, "-m", "build", f"--{kind}", "--outdir", str(into), str(source), env=environment)
    (built,) = (path for path in into.iterdir() if path.name not in before)
    return built


def run(*words: str, env: dict[str, str] | None = None, cwd: Path | None = None) -> str:
    """Return the output of a command."""
    if shutil.which(words[0]) is None:
        raise LmlongError(f"there is no {words[0]}. Install it: pip install {words[0]}.")
    done = subprocess.run(words, env=env, cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode:
        raise LmlongError(f"{' '.join(words)} failed:\n{(done.stdout + done.stderr)[-3000:]}")
    return done.stdout


def unpack(sdist: Path, into: Path) -> Path:
    """Return the source tree of an sdist."""
    with tarfile.open(sdist) as archive:
        archive.extractall(into, filter="data")
    (tree,) = into.iterdir()
    return tree


def check_wheel(wheel: Path, machine: str | None) -> None:
    """Raise LmlongError unless a wheel contains the tracked files of the package and the native code of a machine, and
    nothing else."""
    levels = levels_of(machine) if machine else ()
    native = [path for level in levels for _, path, _ in libraries_of(Path("lmlong/native/prebuilt"), level)]
    expected = {*tracked("lmlong"), *(f"lmlong/{name}" for name in tracked("recipes")), *map(str, native)}
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    metadata = {name for name in names if fnmatch(name, "lmlong-*.dist-info/*")}
    _check_names(wheel, names - metadata, expected)
    if wheel.stat().st_size > MAX_WHEEL:
        raise LmlongError(f"{wheel.name}: {wheel.stat().st_size:,} bytes, more than {MAX_WHEEL:,}.")
    if machine:
        report = " ".join(run("auditwheel", "show", str(wheel)).split())
        platform = wheel.stem.rsplit("-", 1)[1]
        if f'consistent with the following platform tag: "{platform}"' not in report:
            raise LmlongError(f"{wheel.name}: the libraries need other systems: {report}")


def check_sdist(sdist: Path) -> None:
    """Raise LmlongError unless an sdist contains the tracked files that it should, and nothing else."""
    with tarfile.open(sdist) as archive:
        names = {member.name.split("/", 1)[1] for member in archive if member.isfile()}
    files = [name for name in tracked(".") if "/" not in name]
    _check_names(sdist, names - {"PKG-INFO"}, {*files, *(name for each in IN_SDIST for name in tracked(each))})


def _check_names(archive: Path, names: set[str], expected: set[str]) -> None:
    problems = [
        *(f"{name} is missing" for name in expected - names),
        *(f"{name} is stray" for name in names - expected),
    ]
    if problems:
        raise LmlongError(f"{archive.name}: {', '.join(sorted(problems)[:20])}.")


def tracked(folder: str) -> Sequence[str]:
    """Return the files that git tracks below a folder of the source."""
    return run("git", "ls-files", folder, cwd=ROOT).splitlines()


def check_same(wheel: Path, other: Path) -> None:
    """Raise LmlongError unless two wheels have the same contents."""
    ours, theirs = _digests(wheel), _digests(other)
    if different := {name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)}:
        raise LmlongError(
            f"{wheel.name}: {', '.join(sorted(different)[:20])} differ in the wheel built from the sdist."
        )


def _digests(wheel: Path) -> dict[str, str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: sha256(archive.read(name)).hexdigest() for name in archive.namelist()}
