"""Whether a file can be trusted to be this user's: code that others may have put there is not loaded."""

import grp
import os
import pwd
import stat
from pathlib import Path


def is_private(path: Path) -> bool:
    """Whether nobody but this user and root could have written a file or folder, or put it where it lies."""
    trusted = {0, os.geteuid()}
    path = path.resolve()
    for place in (path, *path.parents):
        try:
            found = place.lstat()
        except OSError:
            return False
        # in a sticky folder, such as /tmp, nobody removes or exchanges what is another's
        sticky = place != path and stat.S_ISDIR(found.st_mode) and found.st_mode & stat.S_ISVTX
        if found.st_uid not in trusted or (_others_write(place, found) and not sticky):
            return False
    return True


def _others_write(place: Path, found: os.stat_result) -> bool:
    """Whether anybody may write but the owner, and the owner's group of one."""
    group = found.st_mode & stat.S_IWGRP and (not _is_group_of_one(found.st_gid) or _has_access_list(place))
    return bool(group or found.st_mode & stat.S_IWOTH)


def _is_group_of_one(gid: int) -> bool:
    """Whether a group is that of this user alone, as many systems give to each user."""
    try:
        group, user = grp.getgrgid(gid), pwd.getpwuid(os.geteuid())
    except KeyError:
        return False
    others = {known.pw_name for known in pwd.getpwall() if known.pw_gid == gid} | set(group.gr_mem)
    return group.gr_name == user.pw_name and not others - {user.pw_name}


def _has_access_list(place: Path) -> bool:
    """Whether further users are named who may write, which the bits of the group stand for then."""
    try:
        return "system.posix_acl_access" in os.listxattr(place)
    except (OSError, AttributeError):
        return False


def make_private(folder: Path) -> bool:
    """Make a folder that only this user can write to, unless it is there; False where there can be none."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        if not folder.exists():
            folder.mkdir(mode=0o755)
    except OSError:
        return False
    return is_private(folder)
