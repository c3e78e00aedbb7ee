"""The surprisal of each unit of a text: of its tokens, bytes, lines, or stretches that double in length.

The bits of a token that crosses the end of a unit are divided by bytes, so the bits of units sum to those of tokens.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np

from lmlong.data.tokenizers.base import LOSSLESS, Tokenizer
from lmlong.surprisal.robust_score import RobustScore
from lmlong.surprisal.token_bits import TokenBits

Unit = Literal["token", "byte", "line", "record", "position"]

NEWLINE = b"\n"

KEPT = 200
"""Bytes of the beginning of a unit that are kept as its text."""

COUNTS = ("number", "place", "begin", "read", "size", "tokens")
"""The saved counts of an open unit and of the text before it."""


class Surprise(NamedTuple):
    """The surprisal of one unit of a text."""

    source: str
    number: int  # of the unit in its text, from 1
    offset: int  # bytes of its text before it
    bytes: int  # of the input
    tokens: int  # that begin in it
    bits: float
    mean: float  # bits per byte of all units so far
    z: float | None  # robust z-score against the units before; None for the first few
    text: str  # its beginning

    @property
    def bits_per_byte(self) -> float | None:
        return self.bits / self.bytes if self.bytes else None


@dataclass
class Totals:
    """The sums over all units so far, of all texts."""

    bits: float = 0.0
    bytes: int = 0
    tokens: int = 0
    scores: RobustScore = field(default_factory=RobustScore)

    def add(self, bits: float, size: int, tokens: int) -> None:
        self.bits, self.bytes, self.tokens = self.bits + bits, self.bytes + size, self.tokens + tokens

    def to_json(self) -> dict[str, Any]:
        return {"bits": self.bits, "bytes": self.bytes, "tokens": self.tokens, "scores": self.scores.to_json()}

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> "Totals":
        scores = RobustScore.from_json(saved["scores"])
        return cls(float(saved["bits"]), int(saved["bytes"]), int(saved["tokens"]), scores)


class Units:
    """The units of one text, from its tokens as they are read, in constant memory."""

    def __init__(self, tokenizer: Tokenizer, unit: Unit, source: str, totals: Totals, keep: int, pending: int = 0):
        """Create the units of a text; they are without the `pending` bytes before it that its tokens begin with."""
        self._tokenizer, self._unit, self._source = tokenizer, unit, source
        self._totals, self._keep = totals, keep
        self._gaps: deque[tuple[int, int]] = deque()  # positions, and how many more bytes the input has there
        self._passed = 0  # the additional bytes of all gaps before
        self._number = 0
        self._place = -pending  # bytes of the text so far
        self._begin = 0  # bytes of the input before the open unit
        self._read = 0  # tokens of the text
        self._bits, self._size, self._tokens, self._text = 0.0, 0, 0, b""  # of the open unit
        self._has_newline = tokens_with(tokenizer, NEWLINE) if unit == "line" else None

    def add_gap(self, offset: int, more: int) -> None:
        """Note that at an offset of the text that is not read yet, the input has `more` additional bytes, because some
        could not be decoded or a character has no token."""
        self._gaps.append((offset, more))

    def add(self, read: TokenBits) -> Iterator[Surprise]:
        """Iterate over the units that these tokens complete."""
        read = self._after_pending(read)
        begin = 0
        for end in self._ends(read.tokens):
            self._extend(read.tokens[begin : end - 1], read.bits[begin : end - 1])
            yield from self._divide(int(read.tokens[end - 1]), float(read.bits[end - 1]))
            begin = end
        self._extend(read.tokens[begin:], read.bits[begin:])
        self._input_bytes()  # or the gaps of an endless unit would accumulate

    def close(self) -> Iterator[Surprise]:
        """Iterate over the open unit, which ends here, unless it is empty."""
        if self._size or self._tokens:
            yield self._complete()

    def to_json(self) -> dict[str, Any]:
        """Return the open unit and its position, as plain values."""
        return {name: getattr(self, f"_{name}") for name in COUNTS} | {
            "bits": self._bits,
            "text": self._text.hex(),
            "gaps": {"passed": self._passed, "ahead": list(self._gaps)},
        }

    def restore(self, saved: dict[str, Any]) -> None:
        """Continue from the return value of `to_json`."""
        for name in COUNTS:
            setattr(self, f"_{name}", int(saved[name]))
        self._bits, self._text = float(saved["bits"]), bytes.fromhex(saved["text"])
        self._passed = int(saved["gaps"]["passed"])
        self._gaps = deque((int(offset), int(more)) for offset, more in saved["gaps"]["ahead"])

    def _after_pending(self, read: TokenBits) -> TokenBits:
        """Leave out the tokens that end before the text begins."""
        if self._place >= 0:
            return read
        ends = self._place + np.cumsum(self._tokenizer.token_bytes[read.tokens])
        outside = int(np.searchsorted(ends, 0, side="right"))
        self._place = int(ends[outside - 1]) if outside else self._place
        return TokenBits(read.tokens[outside:], read.bits[outside:])

    def _skip(self) -> int:
        """Move to the beginning of the text, and return how many bytes of the next token are before it."""
        skipped, self._place = max(-self._place, 0), max(self._place, 0)
        return skipped

    def _ends(self, tokens: np.ndarray) -> list[int]:
        """Return the indices after the tokens at or within which a unit may end."""
        if self._unit in ("token", "byte"):
            return list(range(1, len(tokens) + 1))
        if self._unit == "line":
            assert self._has_newline is not None
            return (np.flatnonzero(self._has_newline[tokens]) + 1).tolist()
        if self._unit == "position":  # a unit ends after 2^n tokens of the text
            count = self._read + np.arange(1, len(tokens) + 1)
            return (np.flatnonzero(count & (count - 1) == 0) + 1).tolist()
        return []

    def _divide(self, token: int, bits: float) -> Iterator[Surprise]:
        """Add a token at or within which units end, and iterate over these."""
        data = self._tokenizer.decode_bytes([token])[self._skip() :]
        self._read += 1
        self._tokens += 1
        parts = _parts(data, self._unit)
        for part in parts[:-1]:
            self._put(part, bits * len(part) / len(data))
            yield self._complete()
        last = parts[-1]
        self._put(last, bits * len(last) / len(data) if data else bits)
        if self._unit != "line":
            yield self._complete()

    def _extend(self, tokens: np.ndarray, bits: np.ndarray) -> None:
        """Add tokens that are all in the open unit."""
        if not len(tokens):
            return
        self._tokens += len(tokens)
        self._read += len(tokens)
        skipped = self._skip()
        room = self._keep - len(self._text)
        if room > 0:
            self._text += self._tokenizer.decode_bytes(tokens[: room + skipped].tolist())[skipped:][:room]
        size = int(self._tokenizer.token_bytes[tokens].sum()) - skipped
        self._size, self._place = self._size + size, self._place + size
        self._bits += float(bits.sum())

    def _put(self, data: bytes, bits: float) -> None:
        self._text += data[: max(self._keep - len(self._text), 0)]
        self._size, self._place = self._size + len(data), self._place + len(data)
        self._bits += bits

    def _input_bytes(self) -> int:
        """Return the bytes of the input before the end of the text so far."""
        while self._gaps and self._gaps[0][0] < self._place:
            self._passed += self._gaps.popleft()[1]
        return self._place + self._passed

    def _complete(self) -> Surprise:
        end = self._input_bytes()
        size = end - self._begin
        totals = self._totals
        totals.add(self._bits, size, self._tokens)
        self._number += 1
        mean = totals.bits / totals.bytes if totals.bytes else 0.0
        z = totals.scores.add(compared(self._unit, self._bits, size))
        text = self._text.decode("utf-8", LOSSLESS)
        unit = Surprise(self._source, self._number, self._begin, size, self._tokens, self._bits, mean, z, text)
        self._begin, self._bits, self._size, self._tokens, self._text = end, 0.0, 0, 0, b""
        return unit


SHORT = 16
"""Bytes added to the size of a unit, so that a rare byte in a short unit does not make it unusual."""


def compared(unit: Unit, bits: float, size: int) -> float:
    """Return the number by which a unit is compared with others: its bits per byte, with SHORT bytes added to its size;
    for a token its bits."""
    return bits if unit == "token" else bits / (max(size, 0) + SHORT)


def tokens_with(tokenizer: Tokenizer, part: bytes) -> np.ndarray:
    """Return for each token whether it contains these bytes (V,)."""
    return np.fromiter((part in tokenizer.decode_bytes([token]) for token in range(tokenizer.vocabulary)), dtype=bool)


def _parts(data: bytes, unit: Unit) -> list[bytes]:
    """Return a token's bytes, cut after each byte or newline; the last part may be empty."""
    if unit == "byte":
        return [data[index : index + 1] for index in range(len(data))] or [b""]
    if unit == "line":
        *lines, rest = data.split(NEWLINE)
        return [*(line + NEWLINE for line in lines), rest]
    return [data]
