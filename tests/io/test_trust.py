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
    assert is_private(tmp_path / "file") and not is_private(tmp_path / "missing")
    assert not make_private(tmp_path / "file" / "below")
    (tmp_path / "file").chmod(0o666)
    assert not is_private(tmp_path / "file")


@pytest.mark.parametrize("mode", [0o777, 0o757, 0o1777])
def test_folder_that_others_can_write_is_not_private(tmp_path: Path, mode: int) -> None:
    folder, inner, link = tmp_path / "shared", tmp_path / "shared" / "inner", tmp_path / "link"
    inner.mkdir(parents=True)
    folder.chmod(mode)
    link.symlink_to(folder)
    assert not is_private(folder) and not is_private(link)
    assert is_private(inner) == bool(mode & stat.S_ISVTX), "in a sticky folder what is one's own stays"


@needs_root
@pytest.mark.parametrize(
    ("mode", "owner", "group", "is_trusted"),
    [
        (0o755, 12345, 12345, False),
        (0o755, 0, 0, True),
        (0o775, 0, 0, True),  # a private group
        (0o775, 0, 12345, False),
    ],
)
def test_owner_and_group_are_trusted_or_not(
    tmp_path: Path, mode: int, owner: int, group: int, is_trusted: bool
) -> None:
    inner = tmp_path / "folder" / "inner"
    inner.mkdir(parents=True)
    inner.parent.chmod(mode)
    os.chown(inner.parent, owner, group)
    assert is_private(inner.parent) == is_private(inner) == is_trusted, "its owner can exchange what is in it"
