"""Check file permissions: code that other users could have written is not loaded."""

import os
import stat
from pathlib import Path


def is_private(path: Path, owner_of: Path | None = None) -> bool:
    """Return whether only this user, root and the owner of another file could have written a file or folder, or put it
    at its path. False on Windows, whose permissions are not checked."""
    if os.name == "nt":
        return False
    trusted = {0, os.geteuid()} | ({owner_of.stat().st_uid} if owner_of else set())
    path = path.resolve()
    for each in (path, *path.parents):
        try:
            status = each.lstat()
        except OSError:
            return False
        # in a sticky folder, such as /tmp, nobody can remove or replace another user's file
        is_sticky = each != path and stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX
        if status.st_uid not in trusted or (_others_write(each, status) and not is_sticky):
            return False
    return True


def make_private(folder: Path) -> bool:
    """Create a folder if it is missing. Return whether only this user can write to it."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        if not folder.exists():
            folder.mkdir(mode=0o755)
    except OSError:
        return False
    return is_private(folder)


def _others_write(path: Path, status: os.stat_result) -> bool:
    """Return whether users other than the owner may write. A group with only the owner does not count."""
    if status.st_mode & stat.S_IWOTH:
        return True
    return bool(status.st_mode & stat.S_IWGRP) and (not _is_group_of_one(status.st_gid) or _has_access_list(path))


def _is_group_of_one(gid: int) -> bool:
    """Return whether this user is the only member of a group, as many systems create for each user."""
    import grp  # on Unix only, as is pwd
    import pwd

    try:
        group, user = grp.getgrgid(gid), pwd.getpwuid(os.geteuid())
    except KeyError:
        return False
    members = {entry.pw_name for entry in pwd.getpwall() if entry.pw_gid == gid} | set(group.gr_mem)
    return group.gr_name == user.pw_name and members <= {user.pw_name}


def _has_access_list(path: Path) -> bool:
    """Return whether a file has an access list, whose further users the group's permission bits then include."""
    try:
        return "system.posix_acl_access" in os.listxattr(path)
    except (OSError, AttributeError):
        return False
