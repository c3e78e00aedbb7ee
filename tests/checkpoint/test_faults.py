"""Saving under fire: each operation on the disk fails or is the last one, and a checkpoint that verifies remains."""

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lmlong.checkpoint import manifest, write
from lmlong.errors import CheckpointError, LmlongError

OPERATIONS = [
    (os, "fsync"),
    (os, "open"),
    (Path, "rename"),
    (Path, "replace"),
    (Path, "mkdir"),
    (Path, "write_text"),
    (Path, "write_bytes"),
    (shutil, "rmtree"),
    (write, "save_in_turn"),
]


def contents(number: int) -> write.Contents:
    weights = {str(n): torch.full((5_000,), float(number)) for n in range(2)}
    return write.Contents(weights, {"step": number, "moments": torch.ones(5_000)}, "recipe", b"tokenizer", number)


def save(folder: Path, number: int) -> None:
    """What a run does: write, verify, remove the one before; now and then the same step once more."""
    path = folder / f"step-{number:08d}"
    write.write(path, contents(number))
    manifest.verify(path)
    for other in folder.glob("step-*"):
        if other != path:
            write.remove(other)


def whole(folder: Path) -> list[str]:
    """The checkpoints that verify."""
    found = []
    for path in sorted(folder.glob("step-*")):
        try:
            manifest.verify(path)
            found.append(path.name)
        except CheckpointError:
            continue
    return found


class Fuse:
    """Lets so many operations pass and does something else in the place of the next."""

    def __init__(self, patch: pytest.MonkeyPatch, passed: int, act: Callable[[], Any]):
        self.left, self.act = passed, act
        for owner, name in OPERATIONS:
            patch.setattr(owner, name, self._counted(getattr(owner, name)))

    def _counted(self, operation: Callable) -> Callable:
        def counted(*arguments: Any, **options: Any) -> Any:
            self.left -= 1
            return self.act() if self.left == -1 else operation(*arguments, **options)

        return counted


def end_at_each_operation(folder: Path) -> None:
    """Save in children that end at one operation after the other, as by a power cut that keeps what was done before."""
    for passed in range(100):
        run = folder / str(passed)
        save(run, 1)
        child = os.fork()  # noqa: TID251 - this program has one thread
        if not child:
            Fuse(pytest.MonkeyPatch(), passed, lambda: os._exit(9))
            save(run, 2)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
        assert set(whole(run)) & {"step-00000001", "step-00000002"}
        write.clean(run)
        assert not list(run.glob(".*"))
        save(run, 3)
        assert whole(run) == ["step-00000003"]
        if code == 0:
            break
    assert code == 0 and passed > 15


CUT = """
import sys
from pathlib import Path
from checkpoint.test_faults import end_at_each_operation
end_at_each_operation(Path(sys.argv[1]))
"""


def test_any_operation_may_be_the_last(tmp_path: Path) -> None:
    """In a process of its own: one that is forked has one thread."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, "-c", CUT, tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=200)
    assert done.returncode == 0, done.stderr
    assert len(list(tmp_path.iterdir())) > 15


def test_any_operation_may_fail(tmp_path: Path) -> None:
    def fail() -> None:
        raise OSError(errno.EIO, "planted")

    failures = 0
    for passed in range(100):
        folder = tmp_path / str(passed)
        save(folder, 1)
        with pytest.MonkeyPatch.context() as patch:
            Fuse(patch, passed, fail)
            try:
                save(folder, 2)
            except (OSError, LmlongError):
                failures += 1
            else:
                break
        assert set(whole(folder)) & {"step-00000001", "step-00000002"}
        save(folder, 3)
        assert whole(folder) == ["step-00000003"]
    assert failures > 12


def test_step_may_be_saved_again(tmp_path: Path) -> None:
    for number in (1, 1, 2, 2):
        save(tmp_path, number)
    assert whole(tmp_path) == ["step-00000002"]


def test_too_little_space_is_seen_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1)
    need = write.size(contents(2))
    disk = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: disk._replace(free=need - 1234))
    with pytest.raises(LmlongError, match=rf"needs {need:,} bytes, 1,234 more than are free\. Free some space"):
        write.write(tmp_path / "step-00000002", contents(2))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001"]
    manifest.verify(tmp_path / "step-00000001")


def test_size_of_a_checkpoint_is_known(tmp_path: Path) -> None:
    save(tmp_path, 1)
    there = sum(path.stat().st_size for path in (tmp_path / "step-00000001").iterdir())
    assert there <= write.size(contents(1)) < there + 100_000


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 400 kB, or where mounting is refused an ordinary folder."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = (
        shutil.which("mount")
        and not subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", folder], capture_output=True, check=False
        ).returncode
    )
    yield folder
    if mounted:
        subprocess.run(["umount", folder], check=True)


def test_disk_fills_up_while_saving(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(small_disk, 1)
    check_space = write._check_space
    # the disk fills up after the first look at it
    monkeypatch.setattr(write, "_check_space", lambda folder, of, cause=None: cause and check_space(folder, of, cause))
    (small_disk / "ballast").write_bytes(bytes(290_000))
    if not small_disk.is_mount():  # a stand-in for the disk that could not be mounted

        def half(tensors: dict, path: Path) -> None:
            path.write_bytes(bytes(20_000))
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(write, "save_one_at_a_time", half)
    reason = "more than are free" if small_disk.is_mount() else "the disk or a quota is full"
    with pytest.raises(LmlongError, match=f"a checkpoint needs .*{reason}") as failed:
        save(small_disk, 2)
    assert failed.value.exit_code == 1
    assert sorted(path.name for path in small_disk.iterdir()) == ["ballast", "step-00000001"]
    manifest.verify(small_disk / "step-00000001")
