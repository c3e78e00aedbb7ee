"""Saving under fire: each operation on the disk fails or is the last one, and a checkpoint that verifies remains."""

import errno
import os
import shutil
from collections.abc import Callable
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
    """What a run does: write, verify, remove the one before."""
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


def tree(folder: Path) -> list[tuple[Path, int]]:
    return sorted((path, path.stat().st_size) for path in folder.rglob("*"))


class PowerCut(BaseException):
    """The process ends, and does nothing more to the disk."""


class Fuse:
    """Lets so many operations on a folder pass; the next one fails, or that one and all after it, as by a power cut."""

    def __init__(self, patch: pytest.MonkeyPatch, folder: Path, passed: int, is_cut: bool):
        self.left, self.folder, self.is_cut = passed, folder, is_cut
        self.tree: list[tuple[Path, int]] | None = None
        for owner, name in OPERATIONS:
            patch.setattr(owner, name, self._counted(getattr(owner, name)))

    def _counted(self, operation: Callable) -> Callable:
        def counted(*arguments: Any, **options: Any) -> Any:
            self.left -= 1
            if self.left < 0 and self.is_cut:
                self.tree = self.tree or tree(self.folder)
                raise PowerCut
            if self.left == -1:
                raise OSError(errno.EIO, "planted")
            return operation(*arguments, **options)

        return counted


@pytest.mark.parametrize("is_cut", [False, True], ids=["fails", "is the last"])
def test_a_checkpoint_remains_whichever_operation(tmp_path: Path, is_cut: bool) -> None:
    for passed in range(100):
        folder = tmp_path / str(passed)
        save(folder, 1)
        with pytest.MonkeyPatch.context() as patch:
            fuse = Fuse(patch, folder, passed, is_cut)
            try:
                save(folder, 2)
            except (PowerCut, OSError, LmlongError):
                assert fuse.tree in (None, tree(folder)), "the disk has changed after the cut"
        assert set(whole(folder)) & {"step-00000001", "step-00000002"}
        write.clean(folder)
        assert not list(folder.glob(".*"))
        save(folder, 3)
        assert whole(folder) == ["step-00000003"]
        if fuse.left >= 0:
            break
    assert 15 < passed < 99
    save(folder, 3)
    assert whole(folder) == ["step-00000003"], "a step may be saved again"


def test_size_of_a_checkpoint_is_known(tmp_path: Path) -> None:
    save(tmp_path, 1)
    there = sum(path.stat().st_size for path in (tmp_path / "step-00000001").iterdir())
    assert there <= write.size(contents(1)) < there + 100_000


MISSING = rf"needs {write.size(contents(2)):,} bytes, 1,234 more than are free\. Free some space"


@pytest.mark.parametrize(
    ("filled", "error", "reason"),
    [
        ("before", None, MISSING),
        ("while saving", errno.EFBIG, MISSING),
        ("by a quota", errno.EDQUOT, "a checkpoint needs .* bytes, the disk or a quota is full"),
    ],
)
def test_full_disk_keeps_the_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, filled: str, error: int | None, reason: str
) -> None:
    save(tmp_path, 1)
    disk = shutil.disk_usage(tmp_path)

    def fill(*_: object) -> None:
        staged = tmp_path / ".step-00000002.partial"
        there = sum(path.stat().st_size for path in staged.glob("*"))
        free = write.size(contents(2)) - 1234 - there
        monkeypatch.setattr(shutil, "disk_usage", lambda path: disk._replace(free=free))

    def half(tensors: dict, path: Path) -> None:
        path.write_bytes(bytes(20_000))
        if filled == "while saving":
            fill()
        raise OSError(error, "planted")

    if filled == "before":
        fill()
    else:
        monkeypatch.setattr(write, "save_one_at_a_time", half)
    with pytest.raises(LmlongError, match=reason) as failed:
        save(tmp_path, 2)
    assert failed.value.exit_code == 1
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    manifest.verify(tmp_path / "step-00000001")
