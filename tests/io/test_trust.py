"""Code is loaded only from where nobody but its user can have put it."""

import os
import stat
from pathlib import Path

import pytest
from machine import needs_root

from lmlong.io.trust import is_private
from lmlong.native.build import make_private


def test_own_folder_is_private_if_it_can_be_made(tmp_path: Path) -> None:
    assert make_private(tmp_path / "a" / "b")
    assert is_private(tmp_path / "a" / "b")
    (tmp_path / "file").write_text("")
    assert not make_private(tmp_path / "file" / "below")


@pytest.mark.parametrize("mode", [0o777, 0o757, 0o1777])
def test_folder_that_others_can_write_is_not_private(tmp_path: Path, mode: int) -> None:
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(mode)
    assert not is_private(folder)
    inner = folder / "inner"
    inner.mkdir(mode=0o755)
    assert is_private(inner) == bool(mode & stat.S_ISVTX), "in a sticky folder what is one's own stays"


def test_file_that_others_can_write_is_not_private(tmp_path: Path) -> None:
    file = tmp_path / "code.so"
    file.write_text("")
    assert is_private(file)
    file.chmod(0o666)
    assert not is_private(file)


@needs_root
def test_folder_of_another_user_is_not_private(tmp_path: Path) -> None:
    folder = tmp_path / "his"
    folder.mkdir(mode=0o755)
    os.chown(folder, 12345, 12345)
    assert not is_private(folder)
    inner = folder / "inner"
    inner.mkdir()
    assert not is_private(inner), "its owner can exchange it"
    os.chown(folder, 0, 0)
    assert is_private(inner)


@needs_root
def test_private_group_is_trusted(tmp_path: Path) -> None:
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o775)
    assert is_private(folder)
    os.chown(folder, 0, 12345)
    assert not is_private(folder)


def test_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o777)
    (tmp_path / "link").symlink_to(tmp_path / "shared")
    assert not is_private(tmp_path / "link")
    assert not is_private(tmp_path / "missing")
