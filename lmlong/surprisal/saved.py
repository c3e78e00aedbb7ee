"""Saved scores, which a later run continues: a text's in the metadata of its state file, those of records in a ZIP file
with a state file for each text and everything else as JSON.

The file may come from anybody, so every value is validated. In the ZIP file nothing is compressed, so states are read
and written at the speed of the disk, and no entry is larger than the file.
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
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

from lmlong.errors import CheckpointError, other_format
from lmlong.inference import state_file
from lmlong.io.files import fsync, parse_json, staged
from lmlong.io.system_errors import explain_errors
from lmlong.surprisal.robust_score import CENTERS

FORMAT = 1
ABOUT = "score.json"
LARGEST = 1 << 30
"""Largest size of the JSON in bytes."""

BROKEN = (
    *(zipfile.BadZipFile, KeyError, ValueError, TypeError, AttributeError, NotImplementedError, EOFError, IndexError),
    *(OverflowError, RuntimeError, struct.error, zlib.error),
)
"""Exceptions of zipfile for a damaged or crafted archive."""

MOST = 1 << 53
"""Largest count: float64 represents every integer up to it exactly."""

LARGEST_GAP = 4
"""Largest difference in bytes between input and text at one position: that of a character."""

Count = Annotated[int, Field(ge=0, le=MOST)]
Offset = Annotated[int, Field(ge=-MOST, le=MOST)]
Bits = Annotated[float, Field(ge=-1, le=float(MOST))]  # a sum of rounded values may be slightly below 0
Hex = Annotated[str, StringConstraints(pattern=r"^([0-9a-f]{2})*$")]


class Saved(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class SavedScores(Saved):
    """A `RobustScore`."""

    bins: list[Annotated[int, Field(ge=0, lt=len(CENTERS))]]
    counts: list[Annotated[int, Field(ge=1, le=MOST)]]
    taken_at: Count
    median: Annotated[float, Field(ge=0, le=float(MOST))]
    spread: Annotated[float, Field(ge=0, le=float(MOST))]

    @model_validator(mode="after")
    def _agrees(self) -> "SavedScores":
        if len(self.counts) != len(self.bins) or len(set(self.bins)) != len(self.bins) or sum(self.counts) > MOST:
            raise ValueError("bins and counts do not agree")
        if self.taken_at > sum(self.counts) or (self.taken_at and self.spread < CENTERS[1]):
            raise ValueError("taken_at exceeds the counts, or the spread is 0")
        return self


class SavedTotals(Saved):
    bits: Bits
    bytes: Count
    tokens: Count
    scores: SavedScores


class SavedGaps(Saved):
    passed: Offset
    ahead: list[Annotated[list[Offset], Field(min_length=2, max_length=2)]]

    @model_validator(mode="after")
    def _of_characters(self) -> "SavedGaps":
        if any(abs(more) > LARGEST_GAP for _, more in self.ahead):
            raise ValueError("a gap is larger than a character")
        return self


class SavedUnit(Saved):
    """The open unit of `Units`."""

    number: Count
    place: Offset
    begin: Count
    read: Count
    size: Count
    tokens: Count
    bits: Bits
    text: Hex
    gaps: SavedGaps

    @model_validator(mode="after")
    def _begins_before_its_end(self) -> "SavedUnit":
        if self.begin > max(self.place, 0) + self.gaps.passed + LARGEST_GAP:
            raise ValueError("the open unit begins after the end of the text")
        return self


class SavedFilePosition(Saved):
    """An `io.incoming_bytes.FilePosition`."""

    device: Annotated[int, Field(ge=0, lt=1 << 64)]
    inode: Annotated[int, Field(ge=0, lt=1 << 64)]
    offset: Count
    last: Hex


class SavedLines(Saved):
    number: Count
    offset: Count
    size: Count
    held: Hex


class SavedText(Saved):
    """The score of one text, in the metadata of its state file."""

    place: Count
    not_read: Count
    undecoded: Annotated[Hex, StringConstraints(max_length=6)]
    unit: SavedUnit
    totals: SavedTotals
    by: Literal["token", "byte", "line", "record", "position"]
    file: SavedFilePosition


class SavedAbout(Saved):
    """The score of records, in the file of their states. The hashes of model and tokenizer are checked where the file
    is opened."""

    model_config = ConfigDict(extra="allow")

    format: int
    names: list[str]
    field: str | None
    streams: Any
    file: SavedFilePosition
    lines: SavedLines
    totals: SavedTotals

    @model_validator(mode="after")
    def _names_once(self) -> "SavedAbout":
        if len(set(self.names)) != len(self.names):
            raise ValueError("a name occurs twice")
        return self


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


def save_records(path: Path, about: dict[str, Any], states: Iterable[tuple[str, Path]]) -> None:
    """Write the states of texts, given by name and file; each file is read before the next is requested. The result is
    complete or absent, and readable only by its owner, because it holds text."""
    unfinished, names = staged(path), []
    with explain_errors(path):
        try:
            unfinished.touch(state_file.PRIVATE)
            with zipfile.ZipFile(unfinished, "w") as archive:
                for number, (name, file) in enumerate(states):
                    archive.write(file, _entry(number))
                    names.append(name)
                archive.writestr(ABOUT, json.dumps({"format": FORMAT, **about, "names": names}))
            os.chmod(unfinished, state_file.PRIVATE)
            fsync(unfinished)
            unfinished.replace(path)
        finally:
            with suppress(OSError):
                unfinished.unlink()


def _entry(number: int) -> str:
    return f"{number}.state"
