"""Compiled code is loaded only where nobody else can have put it, and only as it was compiled."""

import ctypes
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from machine import needs_compiler, needs_root

from lmlong.io import folder_manifest
from lmlong.native.build import CODE, LIBRARY, find_compiler, load
from lmlong.native.source import NativeCode, Shared

pytestmark = needs_compiler

SOURCE = """
#include "shared.h"
struct Pair { int64_t first; float second; };
extern "C" int64_t answer() { return ANSWER; }
#include "layout.h"
"""

PLANTED = """
#include <cstdio>
__attribute__((constructor)) static void run() { fclose(fopen("WITNESS", "w")); }
extern "C" long answer() { return 0; }
"""


class Pair(ctypes.Structure):
    _fields_ = (("first", ctypes.c_int64), ("second", ctypes.c_float))


SHARED = Shared({}, [], [Pair], {"ANSWER": 7})


def answer(source: Path) -> int:
    library = load(NativeCode(source, SHARED), "it is computed otherwise")
    assert library is not None
    return library.answer()


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of C++ code."""
    folder = tmp_path_factory.mktemp("source")
    (folder / "code.cpp").write_text(SOURCE)
    return folder


def test_two_threads_compile_it_once(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LMLONG_CACHE", str(tmp_path))
    with ThreadPoolExecutor() as threads:
        assert list(threads.map(answer, [source] * 4)) == [7] * 4
    assert capfd.readouterr().err == ""  # nobody waited for another process


@pytest.fixture(scope="module")
def original(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the compiled library."""
    cache = tmp_path_factory.mktemp("original")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LMLONG_CACHE", str(cache))
        assert answer(source) == 7
    (folder,) = (path for path in (cache / "native").iterdir() if path.is_dir())
    return folder


@pytest.fixture
def folder(original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The library in a cache that only this test uses: a process loads the code at a path once."""
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("LMLONG_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return shutil.copytree(original, tmp_path / "cache" / "native" / original.name)


def plant(folder: Path) -> Path:
    """Put in a library's place what somebody else would: code of theirs, rightly sealed. Return the file that it writes
    when it is loaded."""
    code, witness = folder.parents[2] / "planted.cpp", folder.parents[2] / "witness"
    code.write_text(PLANTED.replace("WITNESS", str(witness)))
    compiler = find_compiler()
    assert compiler is not None
    subprocess.run([compiler, "-shared", "-fPIC", str(code), "-o", str(folder / CODE)], check=True)
    (folder / folder_manifest.NAME).unlink()
    folder_manifest.seal(folder, LIBRARY, {})
    return witness


@pytest.mark.filterwarnings("ignore:.*others can write there, so native code is kept in")
@pytest.mark.parametrize("owner", ["nobody else", "everybody", pytest.param("somebody else", marks=needs_root)])
@pytest.mark.parametrize("what", ["cache", "folder", "code"])
def test_planted_code_runs_only_where_nobody_else_can_write(source: Path, folder: Path, what: str, owner: str) -> None:
    witness = plant(folder)
    path = {"cache": folder.parent, "folder": folder, "code": folder / CODE}[what]
    if owner == "everybody":
        path.chmod(0o777)
    elif owner == "somebody else":
        os.chown(path, 12345, 12345)
    trusted = owner == "nobody else"
    assert answer(source) == (0 if trusted else 7)
    assert witness.exists() == trusted


WITHOUT_HOME = """
import sys
from pathlib import Path
from lmlong.native.build import load
from lmlong.native.source import NativeCode, Shared
code = NativeCode(Path(sys.argv[1]), Shared({}, [], [], {"ANSWER": 7}))
print(load(code, "it is computed otherwise").answer())
"""


def test_without_a_home_code_is_temporary(source: Path, tmp_path: Path) -> None:
    """In a process of its own, at whose end the code is removed."""
    tmp_path.chmod(0o777)
    environment = {**os.environ, "HOME": "/dev/null", "LMLONG_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_HOME, str(source)], env=environment, capture_output=True, text=True
    )
    assert done.stdout == "7\n", done.stderr
    place = Path(done.stderr.split("native code is kept in ")[1].split()[0].rstrip("."))
    assert place.name.startswith("lmlong-native-") and not place.exists()


@pytest.mark.parametrize("damage", ["cut short", "a bit", "gone"])
def test_damaged_code_is_recompiled(
    source: Path, folder: Path, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = folder / CODE
    whole = code.read_bytes()
    code.unlink()
    if damage == "cut short":
        code.write_bytes(whole[:4096])
    elif damage == "a bit":
        code.write_bytes(whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:])
    assert answer(source) == 7
    assert "Rebuilding it." in capsys.readouterr().err
    folder_manifest.verify(folder, LIBRARY)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("int64_t first; double second;", "Pair.second has another offset or size in Python"),
        ("int64_t first; float second; int64_t third;", "Pair has other fields in Python"),
    ],
    ids=["of another type", "added"],
)
def test_structure_of_another_layout_does_not_compile(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "code.cpp").write_text(SOURCE.replace("int64_t first; float second;", text))
    with pytest.warns(UserWarning, match=message):
        assert load(NativeCode(tmp_path, SHARED), "it is computed otherwise") is None


def test_missing_compiler_is_reported_once(
    source: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CXX", "")
    for times in (1, 0):
        assert load(NativeCode(source, SHARED), "it is computed otherwise") is None
        message = capsys.readouterr().err
        assert message.count("native code is off") == message.count("Install g++") == times, message
