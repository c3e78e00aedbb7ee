"""The user's home folder, which holds caches, and a replacement for a missing one.

Every command comes here first, so it imports little.
"""

import os
from pathlib import Path

NO_HOME = Path(os.devnull) / ".cache" / "lmlong"
"""The cache of a user without a home: a path that cannot be written to."""


def home_cache() -> Path:
    """Return this user's own cache. Does not create a missing home."""
    home = Path(os.path.expanduser("~"))
    return home / ".cache" / "lmlong" if home.is_absolute() and home.is_dir() else NO_HOME


def lend_home() -> None:
    """Without a home folder, give libraries a temporary folder for their caches, so that they do not create a home."""
    if home_cache() != NO_HOME:
        return
    import atexit
    import shutil
    import tempfile

    temporary = tempfile.mkdtemp(prefix="lmlong-home-")
    atexit.register(shutil.rmtree, temporary, ignore_errors=True)
    for name in ("XDG_CACHE_HOME", "XDG_CONFIG_HOME"):
        os.environ.setdefault(name, temporary)
