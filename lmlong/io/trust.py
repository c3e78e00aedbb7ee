"""Trust in files: code that other users may have written is not loaded."""

import os
import stat
from pathlib import Path


def is_private(path: Path) -> bool:
    """Return whether only this user and root could have written a file or folder, or put it at its path; False on
    Windows, whose permissions are not looked at."""
    if os.name == "nt":
        return False
    trusted = {0, os.geteuid()}
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
    """Make a folder that only this user can write to, if it is missing; False where that is not possible."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        if not folder.exists():
            folder.mkdir(mode=0o755)
    except OSError:
        return False
    return is_private(folder)


def _others_write(path: Path, status: os.stat_result) -> bool:
    """Return whether anybody but the owner, and the owner's group of one, may write."""
    if status.st_mode & stat.S_IWOTH:
        return True
    return bool(status.st_mode & stat.S_IWGRP) and (not _is_group_of_one(status.st_gid) or _has_access_list(path))


def _is_group_of_one(gid: int) -> bool:
    """Return whether a group has this user alone, as many systems give to each user."""
    import grp  # both of Unix only
    import pwd

    try:
        group, user = grp.getgrgid(gid), pwd.getpwuid(os.geteuid())
    except KeyError:
        return False
    members = {entry.pw_name for entry in pwd.getpwall() if entry.pw_gid == gid} | set(group.gr_mem)
    return group.gr_name == user.pw_name and members <= {user.pw_name}


def _has_access_list(path: Path) -> bool:
    """Return whether an access list names further users who may write; the group's bits then stand for them too."""
    try:
        return "system.posix_acl_access" in os.listxattr(path)
    except (OSError, AttributeError):
        return False
