"""`lmlong.score`: the surprisal of each unit of a text, as its bytes arrive, in constant memory."""

import codecs
import os
import stat
from collections.abc import Iterable, Iterator
from io import IOBase
from typing import Any

from lmlong.data.encoding import HOLD_PLACES, PLACEHOLDER
from lmlong.errors import UsageError
from lmlong.inference.loading import TrainedLanguageModel
from lmlong.inference.session import Session
from lmlong.io.incoming_bytes import CHUNK
from lmlong.model.device import Precision
from lmlong.surprisal.token_bits import TextReader
from lmlong.surprisal.units import KEPT, Surprise, Totals, Unit, Units

REPLACEMENT = "\ufffd"


class TextScore:
    """The score of one text, whose bytes arrive in pieces: a token is scored once no further bytes can change it.

    Bytes that are not UTF-8 are read as U+FFFD each, and characters without a token are left out; `not_read` counts the
    bytes of both.
    """

    def __init__(
        self,
        trained: TrainedLanguageModel,
        unit: Unit = "line",
        source: str = "text",
        totals: Totals | None = None,
        session: Session | None = None,
        keep: int = KEPT,
        precision: Precision = "32",
    ):
        self._tokenizer = trained.tokenizer
        self._reader = TextReader(trained, session, precision)
        self.totals = Totals() if totals is None else totals
        pending = 0 if session is None else len(session.unread.pending)
        self._units = Units(trained.tokenizer, unit, source, self.totals, keep, pending)
        self._decoder = codecs.getincrementaldecoder("utf-8")(HOLD_PLACES)
        self._place = 0  # bytes of the text that were given to the reader
        self.not_read = 0
        """Bytes that the model has not read unchanged."""

    @property
    def session(self) -> Session:
        """The session after all bytes so far, with those that are not tokens yet."""
        return self._reader.session

    @property
    def notes(self) -> list[str]:
        """How many bytes were not read, if any."""
        note = f"{self.not_read:,} bytes are not UTF-8 or have no token: read as U+FFFD, or left out"
        return [note] if self.not_read else []

    def read(self, data: bytes) -> Iterator[Surprise]:
        """Iterate over the units that these bytes complete."""
        yield from self._read(self._decoder.decode(data), more=True)

    def settle(self) -> Iterator[Surprise]:
        """Score the pending bytes as if no more came, and iterate over the units that this completes."""
        yield from self._read("", more=False)

    def finish(self, end: bool = False) -> Iterator[Surprise]:
        """Iterate over the remaining units at the end of the text. With `end`, the last one includes the end of the
        document."""
        yield from self._read(self._decoder.decode(b"", final=True), more=False)
        if end:
            yield from self._units.add(self._reader.read_end())
        yield from self._units.close()

    def to_json(self) -> dict[str, Any]:
        """Return the state beside the session that the rest of the text depends on."""
        undecoded = self._decoder.getstate()[0].hex()
        return {"place": self._place, "not_read": self.not_read, "undecoded": undecoded} | {
            "unit": self._units.to_json(),
            "totals": self.totals.to_json(),
        }

    def restore(self, saved: dict[str, Any]) -> None:
        """Continue from the return value of `to_json`."""
        self._place, self.not_read = int(saved["place"]), int(saved["not_read"])
        self._decoder.setstate((bytes.fromhex(saved["undecoded"]), 0))
        self._units.restore(saved["unit"])

    def _read(self, text: str, more: bool) -> Iterator[Surprise]:
        for tokens in self._reader.read([self._readable(text)], more):
            yield from self._units.add(tokens)

    def _readable(self, text: str) -> str:
        """Return the text that the model reads instead, and note where its length differs."""
        readable = self._tokenizer.representable(text)
        if PLACEHOLDER not in text and readable == text:
            self._place += len(text.encode())
            return text
        parts = []
        for character in text:
            given = 1 if character == PLACEHOLDER else len(character.encode())
            read = self._tokenizer.representable(REPLACEMENT if character == PLACEHOLDER else character)
            if character == PLACEHOLDER or read != character:
                self._units.add_gap(self._place, given - len(read.encode()))
                self.not_read += given
            self._place += len(read.encode())
            parts.append(read)
        return "".join(parts)


def score(
    model: TrainedLanguageModel,
    text: str | bytes | Iterable[str | bytes],
    *,
    by: Unit = "line",
    state: Session | None = None,
    precision: Precision | None = None,
) -> Iterator[Surprise]:
    """Iterate over the units of a text, each with its bits, its z-score, and the beginning of its text.

    >>> for line in lmlong.score(model, open("book.txt")):
    ...     if line.z is not None and line.z > 8:
    ...         print(line.number, round(line.bits), line.text)

    The text may come in pieces, or be an open file, and may be endless. Units are `by` token, byte, line, or position:
    stretches, each as long as all text before it. A `state` is continued. `precision` is the number format of the
    forward pass, "32", "bf16" or "16": by default the one that the model was trained in.
    """
    if by not in ("token", "byte", "line", "position"):
        raise UsageError(f"by: {by!r} is not a unit. Choose token, byte, line or position.")
    scores = TextScore(model, by, session=state, precision=model.set_up_evaluation(precision))
    for piece in _pieces(text):
        yield from scores.read(piece.encode("utf-8", "surrogatepass") if isinstance(piece, str) else piece)
    yield from scores.finish()


def _pieces(text: str | bytes | Iterable[str | bytes]) -> Iterator[str | bytes]:
    """Iterate over the pieces of a text; a file is not read line by line, which takes many times as long."""
    if isinstance(text, (str, bytes)):
        yield text
    elif isinstance(text, IOBase) and _is_complete(text):
        while piece := text.read(CHUNK):  # type: ignore[attr-defined]
            yield piece
    else:
        yield from text


def _is_complete(file: IOBase) -> bool:
    """Return whether a file is on disk or in memory, and not a stream such as a pipe."""
    try:
        return stat.S_ISREG(os.fstat(file.fileno()).st_mode)
    except OSError:  # in memory
        return True
