"""Write a folder atomically."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lmlong.io.files import staged
from lmlong.io.system_errors import explain_errors


@contextmanager
def staged_folder(folder: Path, consequence: str) -> Iterator[Path]:
    """Yield an empty folder that becomes `folder` unless an error is raised. `folder` must be missing or empty. Reports
    of system errors end with `consequence`."""
    unfinished = staged(folder)
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        with explain_errors(folder, consequence):
            unfinished.mkdir(parents=True)
            yield unfinished
            if folder.exists():
                folder.rmdir()
            unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
