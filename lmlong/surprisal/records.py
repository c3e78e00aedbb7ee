"""Records, each a line of the input: a document of its own, or the next line of one of many texts."""

from collections import Counter, OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from lmlong.inference import state_file
from lmlong.inference.awake import AwakeSessions
from lmlong.inference.loading import TrainedLanguageModel
from lmlong.inference.session import Session
from lmlong.io.files import parse_json
from lmlong.model.precision import Precision
from lmlong.surprisal.saved import SavedRecords
from lmlong.surprisal.token_bits import TextReader
from lmlong.surprisal.units import Surprise, Totals, compared

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
        return {"number": self._number, "offset": self._offset, "size": self._size, "held": self._held.hex()}

    def restore(self, saved: dict[str, Any]) -> None:
        """Continue from the return value of `to_json`."""
        self._number, self._offset, self._size = (int(saved[name]) for name in ("number", "offset", "size"))
        self._held = bytearray.fromhex(saved["held"])

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


class States:
    """The sessions of up to `most` texts by name: the most recently used in memory, the rest in files of a folder or in
    a saved score."""

    def __init__(
        self,
        trained: TrainedLanguageModel,
        folder: Path,
        memory: int,
        most: int,
        saved: SavedRecords | None = None,
    ):
        self._trained, self._folder, self._most, self._saved = trained, folder, most, saved
        self._awake = AwakeSessions[str](memory)
        # the least recently used first; None for a state that is still in the saved score
        self._asleep: OrderedDict[str, Path | None] = OrderedDict.fromkeys(saved.names if saved else ())
        self._files = 0
        self.forgotten = 0
        """Number of texts whose state was dropped as the least recently used."""

    def take(self, name: str) -> Session | None:
        """Return the session of a text and remove it; None for a new text."""
        if (session := self._awake.pop(name)) is not None:
            return session
        if name in self._asleep:
            path = self._file(name)
            del self._asleep[name]
            session = self._trained.load_state(path)
            path.unlink()
            return session
        return None

    def put(self, name: str, session: Session) -> None:
        for evicted, asleep in self._awake.put(name, session):
            self._asleep[evicted] = self._save(asleep)
        while len(self._awake) + len(self._asleep) > self._most:
            if self._asleep:
                _, path = self._asleep.popitem(last=False)
                if path:
                    path.unlink()
            else:
                self._awake.pop_oldest()
            self.forgotten += 1

    def files(self) -> Iterator[tuple[str, Path]]:
        """Iterate over all texts, the least recently used first, each with the file of its session, which is deleted
        when the next is requested."""
        for name, path in self._asleep.items():
            yield name, self._file(name)
            if path is None:
                self._scratch.unlink()
        for name, session in self._awake.items():
            path = self._save(session)
            yield name, path
            path.unlink()

    @property
    def _scratch(self) -> Path:
        return self._folder / "saved.state"

    def _file(self, name: str) -> Path:
        """Return the file of a session that is not in memory."""
        path = self._asleep[name]
        if path is not None:
            return path
        assert self._saved is not None
        return self._saved.extract(name, self._scratch)

    def _save(self, session: Session) -> Path:
        """Write a session to a file of this process, and return the file."""
        self._files += 1
        path, trained = self._folder / f"{self._files}.state", self._trained
        belongs = (trained.owners, trained.tokenizer, str(trained.checkpoint))
        state_file.save(path, session, trained.model, *belongs, durable=False)
        return path


class RecordScore:
    """Scores records: each as a document of its own, or with `states`, as the next line of the text that a field
    names."""

    def __init__(
        self,
        trained: TrainedLanguageModel,
        totals: Totals,
        keep: int,
        field: str | None = None,
        stream: str | None = None,
        states: States | None = None,
        precision: Precision = "32",
    ):
        self._trained, self._totals, self._keep, self._precision = trained, totals, keep, precision
        self._field, self._stream, self._states = field, stream, states
        self.skipped: Counter[str] = Counter()
        """Number of records that were not scored, by reason."""

    def read(self, line: Line, source: str) -> Iterator[Surprise]:
        """Iterate over the record of a line, unless the line is not a valid record."""
        try:
            text, name = self._parse(line)
        except ValueError as error:
            self.skipped[str(error)] += 1
            return
        bits, tokens = self._score(text, name)
        self._totals.add(bits, line.size, tokens)
        z = self._totals.scores.add(compared("record", bits, line.size))
        mean = self._totals.bits / self._totals.bytes
        shown = text.encode("utf-8", "surrogatepass")[: self._keep].decode("utf-8", "ignore")
        yield Surprise(source, line.number, line.offset, line.size, tokens, bits, mean, z, shown)

    def _parse(self, line: Line) -> tuple[str, str]:
        """Return the text of a line, and the name of its stream; raise a ValueError with the reason if it has none."""
        if line.data is None:
            raise ValueError(f"longer than {LONGEST:,} bytes")
        if not line.data.strip():
            raise ValueError("empty")
        if self._field is None and self._stream is None:
            return line.data.decode("utf-8", "replace"), ""
        try:
            record = parse_json(line.data.decode("utf-8"))
        except ValueError:
            raise ValueError("not JSON") from None
        if not isinstance(record, dict):
            raise ValueError("not a JSON object")
        text = line.data.decode("utf-8") if self._field is None else record.get(self._field)
        if not isinstance(text, str):
            raise ValueError(f"no text in field '{self._field}'")
        if self._stream is not None and not isinstance(record.get(self._stream), (str, int)):
            raise ValueError(f"no name in field '{self._stream}'")
        return text, str(record.get(self._stream)) if self._stream is not None else ""

    def _score(self, text: str, name: str) -> tuple[float, int]:
        """Return the bits and tokens of a record."""
        reader = TextReader(self._trained, self._states.take(name) if self._states else None, self._precision)
        pieces = list(reader.read([text if self._states is None else text + "\n"], more=False))
        if self._states is None:
            pieces.append(reader.read_end())
        else:
            self._states.put(name, reader.session)
        return sum(float(piece.bits.sum()) for piece in pieces), sum(len(piece.tokens) for piece in pieces)
