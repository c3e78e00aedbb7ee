"""A lock keeps others out as long as its process lives."""

import errno
import fcntl
import select
import subprocess
import sys
from pathlib import Path

import pytest

from lmlong.io.lock import Held, lock

HOLDER = """
import sys
from pathlib import Path
from lmlong.io.lock import lock
with lock(Path(sys.argv[1]), waiting="the lock"):
    print("held", flush=True)
    sys.stdin.readline()
"""


def holder(path: Path) -> subprocess.Popen:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "-c", HOLDER, path], text=True, **pipes)


def test_lock_ends_with_its_holder(tmp_path: Path) -> None:
    path = tmp_path / "new" / "lock"
    child = holder(path)
    assert child.stdout is not None and child.stdout.readline() == "held\n"
    with pytest.raises(Held), lock(path):
        pass
    child.kill()
    child.communicate()
    assert path.exists(), "a killed process leaves the file, which locks nobody out"
    with lock(path) as is_locked:
        assert is_locked
    assert not path.exists()


def test_waiting_processes_take_turns(tmp_path: Path) -> None:
    """Each holder removes the file when it is done, so those who wait for it must not hold a file that is gone."""
    path = tmp_path / "lock"
    with lock(path):
        children = [holder(path) for _ in range(3)]
        for child in children:
            assert child.stderr is not None
            assert child.stderr.readline() == "the lock: waiting for another process\n"
    waiting = list(children)
    while waiting:
        ready, _, _ = select.select([child.stdout for child in waiting], [], [], 60)
        (first,) = [child for child in waiting if child.stdout in ready]
        with pytest.raises(Held), lock(path):
            pass
        first.communicate("\n")
        waiting.remove(first)
    assert not path.exists()


def test_lock_is_released_by_an_error_and_keeps_a_file(tmp_path: Path) -> None:
    (tmp_path / "lock").write_text("mine")
    with pytest.raises(RuntimeError), lock(tmp_path / "lock"):
        raise RuntimeError
    with lock(tmp_path / "lock"):
        pass
    assert (tmp_path / "lock").read_text() == "mine"


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK])
def test_without_locks_nobody_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(number, "no locks")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    with lock(tmp_path / "lock") as one, lock(tmp_path / "lock") as two:
        assert not one and not two
