"""A session in a file: a header, and a line of JSON for each turn, which are only ever appended.

A turn holds the tokens in the pieces in which they were read, who wrote them, and the text at its end that is not read
yet. A fork begins after some pieces of its parent, and a session of an uploaded state after that state. Anybody may
have written a file, so every value is checked where it is read.
"""

import os
import re
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from lmlong.errors import CheckpointError
from lmlong.inference.state_file import PRIVATE
from lmlong.inference.state_table import PIECE, Kind, Piece
from lmlong.io.files import check_ordinary, fsync, parse_json
from lmlong.model.language_model import MOST_TOKENS

FORMAT: Literal[1] = 1
MAGIC = b'{"lmlong":"session","format":'
"""How a file begins."""

LONGEST_HEADER = 1 << 16
"""Bytes of the first line."""

NAME = re.compile(r"[0-9a-f]{24}\.session")
ROOT = re.compile(r"[0-9a-f]{24}\.root")

LATEST = 10**13
"""Seconds since 1970 before which sessions are made."""

Id = Annotated[str, Field(pattern=r"^[0-9a-f]{24}$")]
Time = Annotated[float, Field(ge=0, lt=LATEST)]
Token = Annotated[int, Field(ge=0, lt=1 << 31)]
Pieces = list[tuple[Kind, Annotated[list[Token], Field(min_length=1, max_length=PIECE)]]]


class Record(BaseModel):
    """A line of a file."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)

    def line(self) -> bytes:
        return self.model_dump_json(exclude_defaults=True).encode() + b"\n"


class Header(Record):
    """The first line: where the session begins, and the model that reads it."""

    lmlong: Literal["session"]
    format: Literal[1]
    id: Id
    parent: Id | None = None
    length: Annotated[int, Field(ge=0, le=MOST_TOKENS)] = 0
    """The pieces of the parent's file that the session begins with."""
    repeated: Annotated[int, Field(ge=0, le=1 << 40)] = 0
    """Bytes of the parent's text after these pieces, which the session's own pieces begin with."""
    root: bool = False
    """Whether it begins with an uploaded state, which is in another file beside it."""
    made: Time
    run: str
    owners: dict[str, str]


class Line(Record):
    """A turn, and the session after it."""

    pieces: Pieces = []
    unread: tuple[str, str, list[Token]] = ("", "", [])
    """The fields of `UnreadText`, with bytes as Latin-1."""
    options: dict[str, Any] = {}
    at: Time
    tokens: Annotated[int, Field(gt=0, le=MOST_TOKENS)]
    state_bytes: Annotated[int, Field(ge=0, lt=1 << 63)]
    learns: bool = False
    before: str = ""
    tail: str = ""
    """The end of the text: what it has before the turn; in lines without pieces, or of earlier versions, all of it."""
    deleted: bool = False
    """Whether the session was deleted, and is only there for its forks."""


class SessionInfo(NamedTuple):
    """A session as clients see it, with the fields of its JSON."""

    id: str
    object: Literal["session"]
    parent: str | None
    """The session that it was forked from."""
    created: int
    """Seconds since 1970."""
    tokens: int
    bytes: int
    """Of its file."""
    state_bytes: int
    """Of its state in memory."""
    learns: bool
    """Whether it learns from its text."""
    given: str
    """The beginning of what a reader added last."""
    written: str
    """The beginning of what the model wrote after it."""
    tail: str
    """The end of its text."""


class SessionFile:
    """A file, of which the header and the last line are in memory, and what is known of its states."""

    def __init__(self, path: Path, header: Header, last: Line, size: int):
        self.path, self.header, self.last, self.bytes = path, header, last, size
        self.key = b""  # of the session's state, once it is known
        self.saved = 0  # tokens before the last of its states that is known to be on disk

    @property
    def root(self) -> Path:
        """The path of the uploaded state."""
        return self.path.with_suffix(".root")

    @property
    def cursor(self) -> str:
        """The place of the session in a list, as text whose order is that of the list."""
        return f"{self.header.made:020.6f}-{self.header.id}"

    @property
    def all_bytes(self) -> int:
        """Bytes on disk, with the uploaded state."""
        return self.bytes + (self.root.stat().st_size if self.header.root and self.root.exists() else 0)

    @classmethod
    def create(cls, folder: Path, header: Header, line: Line) -> "SessionFile":
        """Write a file with its first turn, and flush it to disk."""
        file = cls(folder / f"{header.id}.session", header, line, 0)
        try:
            file._write(header.line() + line.line(), "xb")
            fsync(folder)
        except BaseException:
            file.path.unlink(missing_ok=True)
            raise
        return file

    @classmethod
    def open(cls, path: Path) -> "SessionFile | None":
        """Return a file, and cut off what a server that was killed had written of its last line. If not even the first
        turn is complete, delete the file and return None. Raise ValueError or OSError for a file of another kind, or a
        damaged one."""
        check_ordinary(path)
        with path.open("rb") as file:
            first = file.readline(LONGEST_HEADER)
            last, end = _last_line(file)
            size = file.seek(0, os.SEEK_END)
        if not (first.startswith(MAGIC) or MAGIC.startswith(first)) or len(first) == LONGEST_HEADER:
            raise ValueError("not a session")
        if end <= len(first):
            path.unlink()
            return None
        about = parse_json(first)
        if type(about) is dict and about.get("format") != FORMAT:
            raise ValueError(f"not of format {FORMAT}, which this version of lmlong reads")
        header, line = Header.model_validate_json(first), Line.model_validate_json(last)
        if path.name != f"{header.id}.session":
            raise ValueError("a copy of another session")
        if end < size:
            os.truncate(path, end)
        return cls(path, header, line, end)

    def append(self, line: Line) -> None:
        """Append a turn, and flush it to disk."""
        self.check()
        try:
            self._write(line.line(), "ab")
        except BaseException:
            os.truncate(self.path, self.bytes)
            raise
        self.last = line

    def check(self) -> None:
        """Raise CheckpointError if somebody else has changed the file."""
        if not self.path.exists() or self.path.stat().st_size != self.bytes:
            raise self.damaged("it was changed or removed by another program")

    def pieces(self) -> list[Piece]:
        """Return the pieces of all turns."""
        return [Piece(kind, tuple(tokens)) for line in self.lines() for kind, tokens in line.pieces]

    def lines(self) -> list[Line]:
        """Return all turns."""
        self.check()
        try:
            with self.path.open("rb") as file:
                if Header.model_validate_json(file.readline()) != self.header:
                    raise ValueError("its header has changed")
                return [Line.model_validate_json(text) for text in file]
        except ValueError as error:
            raise self.damaged(reason(error)) from None

    def damaged(self, why: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {why}. Read the text again.")

    def _write(self, data: bytes, mode: str) -> None:
        with open(self.path, mode, opener=lambda path, flags: os.open(path, flags, PRIVATE)) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        self.bytes += len(data)


def _last_line(file: BinaryIO) -> tuple[bytes, int]:
    """Return the last complete line of a file, and where it ends."""
    size, length = file.seek(0, os.SEEK_END), 1 << 12
    while True:
        begin = max(0, size - length)
        file.seek(begin)
        text = file.read(size - begin)
        end = text.rfind(b"\n") + 1
        before = text.rfind(b"\n", 0, max(0, end - 1)) + 1
        if before or not begin:
            return text[before:end], begin + end
        length *= 8


def reason(error: Exception) -> str:
    """Return what is wrong with a file, in one line."""
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        return f"{'.'.join(map(str, first['loc'])) or 'a line'}: {first['msg']}"
    return str(error)
