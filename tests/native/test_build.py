"""Compiled code is loaded only where nobody else can have put it, and only as it was compiled."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from machine import needs_compiler, needs_root

from lmlong.io import folder_manifest
from lmlong.native.build import CODE, LIBRARY, MORE_FLAGS, find_compiler

pytestmark = needs_compiler

ASK = "from lmlong.attention.linear.native import library; print('native' if library() else 'none')"

PLANTED = """
#include <cstdio>
__attribute__((constructor)) static void run() { fclose(fopen("WITNESS", "w")); }
extern "C" long scratch_size(long, long, long) { return 0; }
"""


def ask(cache: Path, home: Path) -> subprocess.CompletedProcess:
    """Load the library of the scan in a process of its own, compiled without optimization, which takes a third of the
    time."""
    environment = {**os.environ, "LMLONG_CACHE": str(cache), "HOME": str(home), MORE_FLAGS: "-O0"}
    return subprocess.run([sys.executable, "-c", ASK], env=environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the library in a cache of one's own."""
    place = tmp_path_factory.mktemp("compiled")
    done = ask(place / "cache", place)
    assert (done.stdout, done.stderr) == ("native\n", ""), done.stderr
    (folder,) = (place / "cache" / "native").iterdir()
    return folder


def plant(folder: Path, witness: Path) -> None:
    """What somebody else would put there: code of theirs, rightly sealed."""
    folder.mkdir(parents=True)
    source = folder.parent / "planted.cpp"
    source.write_text(PLANTED.replace("WITNESS", str(witness)))
    compiler = find_compiler()
    assert compiler is not None
    subprocess.run([compiler, "-shared", "-fPIC", str(source), "-o", str(folder / CODE)], check=True)
    source.unlink()
    folder_manifest.seal(folder, LIBRARY, {})


@pytest.mark.parametrize("where", ["cache", "library"])
def test_code_that_others_may_have_planted_is_not_run(compiled: Path, tmp_path: Path, where: str) -> None:
    cache, witness = tmp_path / "cache", tmp_path / "witness"
    folder = cache / "native" / compiled.name
    plant(folder, witness)
    {"cache": cache, "library": folder}[where].chmod(0o777)
    done = ask(cache, tmp_path)
    assert not witness.exists()
    assert done.stdout == "native\n", done.stderr
    assert (
        "others can write there, so native code is kept in" if where == "cache" else "Rebuilding it."
    ) in done.stderr


@needs_root
@pytest.mark.parametrize("where", ["native", "code"])
def test_code_that_somebody_else_owns_is_not_run(compiled: Path, tmp_path: Path, where: str) -> None:
    cache, witness = tmp_path / "cache", tmp_path / "witness"
    native = cache / "native"
    folder = native / compiled.name
    plant(folder, witness)
    os.chown({"native": native, "code": folder / CODE}[where], 12345, 12345)
    done = ask(cache, tmp_path)
    assert not witness.exists()
    assert done.stdout == "native\n", done.stderr


def test_the_planted_code_works_where_it_is_let(compiled: Path, tmp_path: Path) -> None:
    plant(tmp_path / "cache" / "native" / compiled.name, tmp_path / "witness")
    ask(tmp_path / "cache", tmp_path)
    assert (tmp_path / "witness").exists()


def test_without_a_home_it_is_compiled_for_this_process(compiled: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o777)
    (tmp_path / "home").write_text("no folder")
    done = ask(tmp_path / "cache", tmp_path / "home")
    assert done.stdout == "native\n" and "lmlong-native-" in done.stderr
    place = Path(done.stderr.split("native code is kept in ")[1].split()[0].rstrip("."))
    assert place.name.startswith("lmlong-native-") and not place.exists(), "it goes with its process"


@pytest.mark.parametrize("damage", ["cut short", "a bit", "emptied", "gone"])
def test_damaged_code_is_compiled_again(compiled: Path, tmp_path: Path, damage: str) -> None:
    code = compiled / CODE
    whole = code.read_bytes()
    if damage == "cut short":
        code.write_bytes(whole[:4096])
    elif damage == "a bit":
        code.write_bytes(whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:])
    elif damage == "emptied":
        for path in compiled.iterdir():
            path.unlink()
    else:
        code.unlink()
    done = ask(compiled.parents[1], tmp_path)
    assert (done.returncode, done.stdout) == (0, "native\n"), done.stderr
    assert "Rebuilding it." in done.stderr
    folder_manifest.verify(compiled, LIBRARY)


def test_without_a_compiler_it_is_told_once(tmp_path: Path) -> None:
    environment = {**os.environ, "LMLONG_CACHE": str(tmp_path), "PATH": "", "CXX": ""}
    for times in (1, 0):
        done = subprocess.run([sys.executable, "-c", ASK], env=environment, capture_output=True, text=True, timeout=60)
        assert done.stdout == "none\n"
        assert done.stderr.count("native code is off") == done.stderr.count("Install g++") == times, done.stderr
