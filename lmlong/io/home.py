"""The home of a user, where caches are kept, and what takes its place where there is none.

Every command comes here first, so it imports little.
"""

import os
from pathlib import Path

NO_HOME = Path(os.devnull) / ".cache" / "lmlong"
"""The cache of a user without a home: a path that cannot be written to."""


def home_cache() -> Path:
    """Return the cache of this user alone. A home that does not exist is not made."""
    home = Path(os.path.expanduser("~"))
    return home / ".cache" / "lmlong" if home.is_absolute() and home.is_dir() else NO_HOME


def lend_home() -> None:
    """Let libraries keep their caches in a folder that is removed at the end, where there is no home: they would make
    one."""
    if home_cache() != NO_HOME:
        return
    import atexit
    import shutil
    import tempfile

    lent = tempfile.mkdtemp(prefix="lmlong-home-")
    atexit.register(shutil.rmtree, lent, ignore_errors=True)
    for name in ("XDG_CACHE_HOME", "XDG_CONFIG_HOME"):
        os.environ.setdefault(name, lent)
