"""Folders of the cache: made once, made again where they are damaged, and swept where their maker died."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lmlong.errors import UsageError
from lmlong.io import cache, files
from lmlong.io.cache import fetch, key_of
from lmlong.io.folder_manifest import Format

MINE, OTHER = key_of("mine"), key_of("other")
FORMAT = Format("thing", 1)


def make(folder: Path) -> None:
    (folder / "data").write_bytes(b"0123456789" * 100)


def test_folder_is_made_once(tmp_path: Path) -> None:
    made: list[Path] = []
    for _ in range(3):
        assert fetch(tmp_path / "a" / "key", FORMAT, made.append) == tmp_path / "a" / "key"
    assert len(made) == 1
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["key"], "no lock and nothing unfinished stays"


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[500] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: flip(folder / "data"),
        lambda folder: (folder / "data").write_bytes(b""),
        lambda folder: (folder / "data").unlink(),
        lambda folder: (folder / "manifest.json").unlink(),
        lambda folder: (folder / "manifest.json").write_text("{"),
        lambda folder: [path.unlink() for path in folder.iterdir()],
    ],
)
def test_damaged_folder_is_rebuilt(
    tmp_path: Path, damage: Callable[[Path], object], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = fetch(tmp_path / "key", FORMAT, make)
    reader = (folder / "data").open("rb")
    damage(folder)
    assert (fetch(folder, FORMAT, make) / "data").read_bytes() == b"0123456789" * 100
    assert "Rebuilding it." in capsys.readouterr().err
    assert len(reader.read()) in (0, 1000)
    assert [path.name for path in tmp_path.iterdir()] == ["key"]


def test_modes_follow_the_umask(tmp_path: Path) -> None:
    def strict(folder: Path) -> None:
        (folder / "data").write_text("")
        (folder / "data").chmod(0o600)

    before = os.umask(0o027)
    try:
        folder = fetch(tmp_path / "key", FORMAT, strict)
    finally:
        os.umask(before)
    assert {oct(path.stat().st_mode & 0o777) for path in folder.iterdir()} == {"0o640"}
    assert folder.stat().st_mode & 0o777 == 0o750


DYING = """
import os, signal, sys
from pathlib import Path
from lmlong.io.cache import fetch
from lmlong.io.folder_manifest import Format
fetch(Path(sys.argv[1]), Format("thing", 1), lambda folder: os.kill(os.getpid(), signal.SIGKILL))
"""


def test_only_unfinished_folders_of_dead_processes_are_removed(tmp_path: Path) -> None:
    own = {f"unfinished-{name}" for name in ("novel", "my-novel", "novel-2", "novel-resumable")}
    for name in own:
        (tmp_path / name).mkdir()
    for key in (MINE, OTHER):  # the second sweeps what the first left
        assert subprocess.run([sys.executable, "-c", DYING, tmp_path / key]).returncode == -signal.SIGKILL
    (left,) = {path.name for path in tmp_path.glob("unfinished-*")} - own
    assert left.startswith(f"unfinished-{OTHER}-")

    def inner(folder: Path) -> None:
        fetch(tmp_path / "third", FORMAT, make)  # which sweeps, and must not take what is being made around it
        make(folder)

    fetch(tmp_path / MINE, FORMAT, inner)
    assert {path.name for path in tmp_path.glob("[!.]*")} == {MINE, "third", *own}


def test_large_file_is_hashed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(cache, "REMEMBERED", 1000)
    hashed, real = [], files.sha256
    monkeypatch.setattr(files, "sha256", lambda path: hashed.append(path.name) or real(path))
    folder = fetch(tmp_path / "key", FORMAT, make)
    for _ in range(3):
        fetch(folder, FORMAT, make)
    assert hashed == ["data"]
    times = (folder / "data").stat()
    flip(folder / "data")
    os.utime(folder / "data", ns=(times.st_atime_ns, times.st_mtime_ns))  # which leaves its other time as it is
    made: list[Path] = []
    fetch(folder, FORMAT, made.append)
    assert len(made) == 1


def test_folder_of_another_user_is_refused(users_folder: Path) -> None:
    users_folder.chmod(0o555)
    with pytest.raises(UsageError, match=r"Permission denied\. Set LMLONG_CACHE to a folder of your own"):
        fetch(users_folder / "key", FORMAT, make)


def test_resumable_folder_is_kept_for_a_week(tmp_path: Path) -> None:
    def begin(folder: Path) -> None:
        assert not list(folder.iterdir())
        (folder / "half").write_text("done")
        (folder / cache.PROGRESS).write_text("{}")
        raise KeyboardInterrupt

    def finish(folder: Path) -> None:
        assert (folder / "half").read_text() == "done"
        (folder / cache.PROGRESS).unlink()

    for key in (MINE, OTHER):
        with pytest.raises(KeyboardInterrupt):
            fetch(tmp_path / key, FORMAT, begin, resumable=True)
    fetch(tmp_path / "new", FORMAT, make)  # which sweeps
    assert (fetch(tmp_path / MINE, FORMAT, finish, resumable=True) / "half").read_text() == "done"
    (left,) = tmp_path.glob("unfinished-*")
    assert left.name.startswith(f"unfinished-{OTHER}-")
    long_ago = time.time() - cache.RESUMABLE_FOR - 1
    os.utime(left / cache.PROGRESS, (long_ago, long_ago))
    fetch(tmp_path / "third", FORMAT, make)
    assert not list(tmp_path.glob("unfinished-*"))


def test_failed_folder_is_not_kept(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "half").write_text("done")
        raise ValueError

    with pytest.raises(ValueError):
        fetch(tmp_path / "key", FORMAT, fail, resumable=True)
    assert not list(tmp_path.iterdir())
    fetch(tmp_path / "key", FORMAT, make, resumable=True)
