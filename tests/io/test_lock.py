"""A lock keeps others out as long as its process lives."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from lmlong.io.lock import Held, Lock, lock_file

HOLDER = """
import sys, time
from pathlib import Path
from lmlong.io.lock import Lock
with Lock(Path(sys.argv[1]), waiting="the lock"):
    print("held", flush=True)
    sys.stdin.readline()
"""


def holder(path: Path) -> subprocess.Popen:
    child = subprocess.Popen(
        [sys.executable, "-c", HOLDER, path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    return child


def line(child: subprocess.Popen) -> str:
    assert child.stdout is not None
    return child.stdout.readline()


def test_a_lock_names_its_holder_and_dies_with_it(tmp_path: Path) -> None:
    path = tmp_path / "new" / "lock"
    child = holder(path)
    assert line(child) == "held\n"
    with pytest.raises(Held, match=f"process {child.pid} on {os.uname().nodename}"), Lock(path):
        pass
    child.kill()
    child.communicate()
    assert path.exists(), "a killed process leaves the file, which locks nobody out"
    with Lock(path):
        assert str(os.getpid()) in path.read_text()
    assert not path.exists()


def test_one_who_has_just_taken_a_lock_is_given_the_time_to_write_its_name(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with path.open("w") as file:
        assert lock_file(file.fileno(), wait=False)
        writing = threading.Timer(0.1, path.write_text, ['{"pid": 7, "host": "there"}'])
        writing.start()
        with pytest.raises(Held, match="process 7 on there"), Lock(path):
            pass
        writing.join()


def test_a_waiting_process_does_not_hold_a_removed_file(tmp_path: Path) -> None:
    """The holder removes the file when it is done; a lock on the removed file would exclude nobody."""
    path, waits, holds, done = tmp_path / "lock", threading.Event(), threading.Event(), threading.Event()

    class WaitingLock(Lock):
        def _acquire(self, descriptor: int) -> None:
            waits.set()
            super()._acquire(descriptor)

    def wait_for_it() -> None:
        with WaitingLock(path, waiting="the lock"):
            holds.set()
            done.wait(60)

    waiting = threading.Thread(target=wait_for_it)
    with Lock(path):
        waiting.start()
        assert waits.wait(60)
        assert not holds.wait(0.2)
    assert holds.wait(60)
    is_there = path.exists()
    done.set()
    waiting.join()
    assert is_there and not path.exists()


def test_those_who_wait_take_turns(tmp_path: Path) -> None:
    """Each holder removes the file when it is done, so those who wait for it must not hold a file that is gone."""
    path = tmp_path / "lock"
    children = [holder(path) for _ in range(4)]
    for _ in range(4):
        (first,) = [child for child in children if child.poll() is None and _is_holder(child, path)][:1]
        with pytest.raises(Held), Lock(path):
            pass
        first.communicate("\n")
    assert not path.exists()


def test_one_who_waits_says_for_whom(tmp_path: Path) -> None:
    with Lock(tmp_path / "lock"):
        child = holder(tmp_path / "lock")
        assert child.stderr is not None
        assert child.stderr.readline() == f"the lock: waiting for process {os.getpid()} on {os.uname().nodename}\n"
    child.communicate("\n")


def _is_holder(child: subprocess.Popen, path: Path) -> bool:
    while True:
        try:
            with Lock(path):
                pass
        except Held as held:
            if "unknown" not in str(held):
                return str(held).startswith(f"process {child.pid} ")


def test_a_lock_is_let_go_of_by_an_error(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), Lock(tmp_path / "lock"):
        raise RuntimeError
    with Lock(tmp_path / "lock"):
        pass
