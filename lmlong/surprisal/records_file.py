"""The saved score of records, as a ZIP file: a state file for each text, and everything else as JSON.

Nothing is compressed, so states are read and written at the speed of the disk, and no entry is larger than the file.
"""

import json
import os
import shutil
import struct
import zipfile
import zlib
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from lmlong.errors import CheckpointError, other_format
from lmlong.inference import state_file
from lmlong.io.files import fsync, parse_json
from lmlong.io.system_errors import explain_errors
from lmlong.surprisal.saved import SavedAbout

FORMAT = 1
ABOUT = "score.json"
LARGEST = 1 << 30
"""Largest size of the JSON in bytes."""

BROKEN = (
    *(zipfile.BadZipFile, KeyError, ValueError, TypeError, AttributeError, NotImplementedError, EOFError, IndexError),
    *(OverflowError, RuntimeError, struct.error, zlib.error),
)
"""Exceptions of zipfile for a damaged or crafted archive."""


class SavedRecords:
    """A file that `save` wrote, opened."""

    def __init__(self, path: Path, belongs: dict[str, str], run: str):
        self.path = path
        try:
            with explain_errors(path):
                self._archive = zipfile.ZipFile(path)
            with self._archive.open(self._stored(ABOUT)) as file:
                self.about: dict[str, Any] = parse_json(file.read(LARGEST))
            version = self.about["format"]
            if type(version) is int and version != FORMAT:
                raise CheckpointError(other_format(path, version, FORMAT, "Score the records again"))
            self.names = SavedAbout.model_validate(self.about).names
        except BROKEN:
            raise self.damaged() from None
        state_file.refuse_other(path, self.about, belongs, run, "or score the records again.")
        self._number = {name: number for number, name in enumerate(self.names)}

    def damaged(self) -> CheckpointError:
        return CheckpointError(f"{self.path}: not a saved score of records, or damaged. Score the records again.")

    def extract(self, name: str, target: Path) -> Path:
        """Write the state of a text to a file, and return it."""
        try:
            entry = self._stored(_entry(self._number[name]))
            with self._archive.open(entry) as source, target.open("wb") as file:
                shutil.copyfileobj(source, file)
        except BROKEN:
            raise self.damaged() from None
        return target

    def _stored(self, name: str) -> zipfile.ZipInfo:
        """Return an entry of the archive; ValueError if it is compressed, and so larger than the file."""
        entry = self._archive.getinfo(name)
        if entry.compress_type != zipfile.ZIP_STORED:
            raise ValueError(name)
        return entry

    def close(self) -> None:
        self._archive.close()


def save(path: Path, about: dict[str, Any], states: Iterable[tuple[str, Path]]) -> None:
    """Write the states of texts, given by name and file; each file is read before the next is requested. The result is
    complete or absent, and readable only by its owner, because it holds text."""
    staged, names = path.with_name(f".{path.name}.partial"), []
    with explain_errors(path):
        try:
            staged.touch(state_file.PRIVATE)
            with zipfile.ZipFile(staged, "w") as archive:
                for number, (name, file) in enumerate(states):
                    archive.write(file, _entry(number))
                    names.append(name)
                archive.writestr(ABOUT, json.dumps({"format": FORMAT, **about, "names": names}))
            os.chmod(staged, state_file.PRIVATE)
            fsync(staged)
            staged.replace(path)
        finally:
            with suppress(OSError):
                staged.unlink()


def _entry(number: int) -> str:
    return f"{number}.state"
