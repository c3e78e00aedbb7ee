"""Trust in files: code that other users may have written is not loaded."""

import os
import stat
from pathlib import Path


def is_private(path: Path) -> bool:
    """Return whether only this user and root could have written a file or folder, or put it at its path; on Windows,
    whose permissions are not looked at, that is not known."""
    if os.name == "nt":
        return False
    trusted = {0, os.geteuid()}
    path = path.resolve()
    for place in (path, *path.parents):
        try:
            found = place.lstat()
        except OSError:
            return False
        # in a sticky folder, such as /tmp, nobody can remove or replace another user's file
        sticky = place != path and stat.S_ISDIR(found.st_mode) and found.st_mode & stat.S_ISVTX
        if found.st_uid not in trusted or (_others_write(place, found) and not sticky):
            return False
    return True


def _others_write(place: Path, found: os.stat_result) -> bool:
    """Return whether anybody but the owner, and the owner's group of one, may write."""
    group = found.st_mode & stat.S_IWGRP and (not _is_group_of_one(found.st_gid) or _has_access_list(place))
    return bool(group or found.st_mode & stat.S_IWOTH)


def _is_group_of_one(gid: int) -> bool:
    """Return whether a group has this user alone, as many systems give to each user."""
    import grp  # both of Unix only
    import pwd

    try:
        group, user = grp.getgrgid(gid), pwd.getpwuid(os.geteuid())
    except KeyError:
        return False
    others = {known.pw_name for known in pwd.getpwall() if known.pw_gid == gid} | set(group.gr_mem)
    return group.gr_name == user.pw_name and not others - {user.pw_name}


def _has_access_list(place: Path) -> bool:
    """Return whether an access list names further users who may write; the group's bits then stand for them too."""
    try:
        return "system.posix_acl_access" in os.listxattr(place)
    except (OSError, AttributeError):
        return False


def make_private(folder: Path) -> bool:
    """Make a folder that only this user can write to, unless it is there; False where that is not possible."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        if not folder.exists():
            folder.mkdir(mode=0o755)
    except OSError:
        return False
    return is_private(folder)
