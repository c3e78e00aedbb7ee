"""Compiled code is loaded only from files that no other user could have written."""

import os
import stat
from pathlib import Path


def is_private(path: Path) -> bool:
    """Return whether a file or folder and the folders above it belong to this user or root, and nobody else can write
    to them. False on Windows, whose permissions are not checked."""
    path = path.resolve()
    return os.name != "nt" and path.exists() and all(_is_own(each, path) for each in (path, *path.parents))


def _is_own(folder: Path, path: Path) -> bool:
    status = folder.stat()
    group_writes = status.st_mode & stat.S_IWGRP and not _is_group_of_one(status.st_gid)
    # in a sticky folder, such as /tmp, nobody can remove or replace another user's file
    is_sticky = folder != path and status.st_mode & stat.S_ISVTX
    return status.st_uid in (0, os.geteuid()) and bool(is_sticky or not (group_writes or status.st_mode & stat.S_IWOTH))


def _is_group_of_one(gid: int) -> bool:
    """Return whether a group has this user's name and no other member, as many systems create for each user."""
    import grp  # on Unix only, as is pwd
    import pwd

    try:
        group, user = grp.getgrgid(gid), pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return False
    return group.gr_name == user and not {*group.gr_mem} - {user}
