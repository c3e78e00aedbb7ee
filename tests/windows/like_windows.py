"""Commands of lmlong in a process that lacks what Windows lacks: a stand-in, for these tests run where there is none.

The modules of lmlong see an `os` of Windows, without fork, user ids, pread and the like, which opens no folder and
flushes no file that is open for reading; a `signal` without SIGHUP, a `select` without poll; no fcntl, resource, pwd
and grp. For all modules there are no symbolic links, no file is removed or renamed while it is open or mapped, and text
is written in cp1252 with \\r\\n unless it is asked otherwise.
"""

import builtins
import errno
import fcntl
import io
import json
import os
import pathlib
import select
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

UNIX_ONLY = {"fcntl", "resource", "pwd", "grp", "termios", "tty", "pty", "posix", "syslog", "deepspeed"}
NOT_IN_OS = {
    *("fork", "forkpty", "getuid", "geteuid", "getgid", "getegid", "getgroups", "setsid", "killpg", "chown", "fchmod"),
    *("pread", "pwrite", "uname", "statvfs", "sysconf", "listxattr", "nice", "getpgid", "wait", "mkfifo", "openpty"),
    *("O_CLOEXEC", "O_NOFOLLOW", "O_DIRECTORY", "O_NONBLOCK", "sched_getaffinity", "posix_fadvise"),
}
NOT_IN_SIGNAL = {"SIGHUP", "SIGKILL", "SIGUSR1", "SIGUSR2", "SIGPIPE", "SIGALRM", "SIGCHLD", "pthread_sigmask", "alarm"}
NOT_IN_SELECT = {"poll", "epoll", "kqueue"}
BINARY = 1 << 30

real_import, real_open = builtins.__import__, io.open
system_open = os.open


class Lacking(ModuleType):
    """A module without some of its names, and with others in the place of some."""

    def __init__(self, module: ModuleType, missing: set[str], **changed: Any):
        super().__init__(module.__name__)
        self.__dict__.update(_module=module, _missing=missing, **changed)

    def __getattr__(self, name: str) -> Any:
        if name in self._missing:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r} on Windows")
        return getattr(self._module, name)


def open_descriptor(path: Any, flags: int, mode: int = 0o777) -> int:
    if os.path.isdir(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))
    return system_open(path, flags & ~BINARY, mode)


def fsync(descriptor: int) -> None:
    if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
        raise OSError(errno.EBADF, "Bad file descriptor")
    os.fsync(descriptor)


def in_use(path: Any) -> bool:
    """Whether this process has opened or mapped a file, or one in a folder."""
    target = os.path.realpath(os.path.dirname(os.path.abspath(path))) + os.sep + os.path.basename(os.path.abspath(path))
    used = set()
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            used.add(os.readlink(f"/proc/self/fd/{descriptor}"))
        except OSError:
            continue
    with real_open("/proc/self/maps") as maps:
        used |= {line.split(maxsplit=5)[5].strip() for line in maps if line.count("/")}
    return any(name == target or name.startswith(target + os.sep) for name in used)


def unless_in_use(change: Callable[..., Any]) -> Callable[..., Any]:
    def refuse(*paths: Any, **options: Any) -> Any:
        if used := [path for path in paths[:2] if isinstance(path, str | Path) and in_use(path)]:
            raise PermissionError(errno.EACCES, "The process cannot access the file: it is in use", str(used[0]))
        return change(*paths, **options)

    return refuse


def no_link(source: Any, link: Any, *_: Any, **__: Any) -> None:
    raise OSError(errno.EINVAL, "A required privilege is not held by the client", str(link))


def open_text(file: Any, mode: str = "r", buffering: int = -1, encoding: Any = None, *rest: Any, **options: Any) -> Any:
    if "b" not in mode:
        encoding = "cp1252" if encoding in (None, "locale") else encoding
        if set(mode) & set("wax+") and len(rest) < 2 and options.get("newline") is None:
            options["newline"] = "\r\n"
        elif set(mode) & set("wax+") and len(rest) >= 2 and rest[1] is None:
            rest = (rest[0], "\r\n", *rest[2:])
    return real_open(file, mode, buffering, encoding, *rest, **options)


def refuse() -> None:
    """Take away from this process what Windows lacks."""
    stand_ins = {
        "os": Lacking(os, NOT_IN_OS, name="nt", open=open_descriptor, fsync=fsync, O_BINARY=BINARY),
        "signal": Lacking(signal, NOT_IN_SIGNAL),
        "select": Lacking(select, NOT_IN_SELECT),
    }

    def importing(name: str, globals: Any = None, *rest: Any, **more: Any) -> Any:
        if str((globals or {}).get("__name__")).startswith("lmlong"):
            if name.partition(".")[0] in UNIX_ONLY:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)
            if name in stand_ins:
                return stand_ins[name]
        return real_import(name, globals, *rest, **more)

    builtins.__import__ = importing
    builtins.open = io.open = open_text
    os.symlink = no_link
    for name in ("unlink", "remove", "rename", "replace"):
        setattr(os, name, unless_in_use(getattr(os, name)))
    shutil._use_fd_functions = False  # type: ignore[attr-defined]
    if accessor := getattr(pathlib, "_NormalAccessor", None):  # Python 3.10 took these functions when it was imported
        for name in ("unlink", "rename", "replace", "symlink"):
            setattr(accessor, name, staticmethod(getattr(os, name)))
        accessor.open = staticmethod(io.open)


if __name__ == "__main__":
    refuse()
    from lmlong.cli.main import main

    for words in json.loads(sys.argv[1]):
        sys.argv = ["lmlong", *words]
        try:
            main()
        except SystemExit as left:
            print(f"\nexit code {left.code} of {words[0]}", flush=True)
