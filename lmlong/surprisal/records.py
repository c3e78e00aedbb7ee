"""Records, each a line of the input and a document of its own."""

from base64 import b64decode, b64encode
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

from lmlong.inference.loading import TrainedLanguageModel
from lmlong.inference.session import Session
from lmlong.io.files import parse_json
from lmlong.model.device import Precision
from lmlong.surprisal.token_bits import TextReader, begin
from lmlong.surprisal.units import KEPT, Surprise, Totals, compared

LONGEST = 1 << 26
"""Largest size of a record in bytes; longer lines are skipped, because a record is held in memory."""


class Line(NamedTuple):
    """A line without its end; without data if it is too long."""

    number: int  # from 1
    data: bytes | None
    offset: int
    size: int  # with its end


class Lines:
    """Splits bytes that arrive in pieces into lines, in bounded memory."""

    def __init__(self, longest: int = LONGEST):
        self._longest = longest
        self._held = bytearray()
        self._number = self._size = self._offset = 0

    def read(self, data: bytes) -> Iterator[Line]:
        """Iterate over the lines that these bytes complete."""
        begin = 0
        while (end := data.find(b"\n", begin)) >= 0:
            self._hold(data[begin:end])
            self._size += 1
            yield self._take()
            begin = end + 1
        self._hold(data[begin:])

    def to_json(self) -> dict[str, Any]:
        """Return the incomplete line and its position, as plain values."""
        held = b64encode(self._held).decode()  # of the longest, 90 MB: a safetensors file has up to 100 MB of metadata
        return {"number": self._number, "offset": self._offset, "size": self._size, "held": held}

    def restore(self, saved: dict[str, Any]) -> None:
        """Continue from the return value of `to_json`."""
        self._number, self._offset, self._size = (int(saved[name]) for name in ("number", "offset", "size"))
        self._held = bytearray(b64decode(saved["held"], validate=True))

    def finish(self) -> Iterator[Line]:
        """Iterate over the last line, if it is incomplete."""
        if self._size:
            yield self._take()

    def _hold(self, data: bytes) -> None:
        self._size += len(data)
        self._held += data[: max(self._longest + 1 - len(self._held), 0)]

    def _take(self) -> Line:
        self._number += 1
        data = None if len(self._held) > self._longest else bytes(self._held)
        line = Line(self._number, data, self._offset, self._size)
        self._offset, self._size = self._offset + self._size, 0
        self._held.clear()
        return line


class RecordScore:
    """The score of records, each a document of its own, whose bytes arrive in pieces."""

    def __init__(
        self,
        trained: TrainedLanguageModel,
        source: str = "text",
        totals: Totals | None = None,
        keep: int = KEPT,
        field: str | None = None,
        precision: Precision = "32",
    ):
        self._trained, self._source, self._keep = trained, source, keep
        self._field, self._precision = field, precision
        self.totals = Totals() if totals is None else totals
        self._lines = Lines()
        self._skipped: Counter[str] = Counter()

    @property
    def session(self) -> Session:
        """The session before each record."""
        return begin(self._trained)

    @property
    def notes(self) -> list[str]:
        """How many records were not scored, by reason."""
        return [f"skipped {count:,} records: {reason}" for reason, count in self._skipped.items()]

    def read(self, data: bytes) -> Iterator[Surprise]:
        """Iterate over the records that these bytes complete."""
        for line in self._lines.read(data):
            yield from self._read(line)

    def settle(self) -> Iterator[Surprise]:
        """Iterate over nothing: an incomplete record is not scored before its end."""
        yield from ()

    def finish(self) -> Iterator[Surprise]:
        """Iterate over the last record, if its line is incomplete."""
        for line in self._lines.finish():
            yield from self._read(line)

    def to_json(self) -> dict[str, Any]:
        """Return what the rest of the input depends on."""
        return {"field": self._field, "lines": self._lines.to_json(), "totals": self.totals.to_json()}

    def restore(self, saved: dict[str, Any]) -> None:
        """Continue from the return value of `to_json`."""
        self._lines.restore(saved["lines"])

    def _read(self, line: Line) -> Iterator[Surprise]:
        """Iterate over the record of a line, unless the line is not a valid record."""
        try:
            text = self._parse(line)
        except ValueError as error:
            self._skipped[str(error)] += 1
            return
        bits, tokens = self._score(text)
        self.totals.add(bits, line.size, tokens)
        z = self.totals.scores.add(compared("record", bits, line.size))
        mean = self.totals.bits / self.totals.bytes
        shown = text.encode("utf-8", "surrogatepass")[: self._keep].decode("utf-8", "ignore")
        yield Surprise(self._source, line.number, line.offset, line.size, tokens, bits, mean, z, shown)

    def _parse(self, line: Line) -> str:
        """Return the text of a line; raise a ValueError with the reason if it has none."""
        if line.data is None:
            raise ValueError(f"longer than {LONGEST:,} bytes")
        if not line.data.strip():
            raise ValueError("empty")
        if self._field is None:
            return line.data.decode("utf-8", "replace")
        try:
            record = parse_json(line.data.decode("utf-8"))
        except ValueError:
            raise ValueError("not JSON") from None
        if not isinstance(record, dict):
            raise ValueError("not a JSON object")
        if not isinstance(text := record.get(self._field), str):
            raise ValueError(f"no text in field '{self._field}'")
        return text

    def _score(self, text: str) -> tuple[float, int]:
        """Return the bits and tokens of a record."""
        reader = TextReader(self._trained, precision=self._precision)
        pieces = [*reader.read([text], more=False), reader.read_end()]
        return sum(float(piece.bits.sum()) for piece in pieces), sum(len(piece.tokens) for piece in pieces)
