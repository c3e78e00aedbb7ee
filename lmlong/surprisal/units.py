"""Surprise: the bits of each unit of a text, of its tokens, bytes, lines or ever longer stretches, as they are read.

A token that crosses the end of a unit gives each its share, by bytes, so the bits of units sum to those of the tokens.
"""

from collections import deque
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import numpy as np

from lmlong.data.tokenizers.base import LOSSLESS, Tokenizer
from lmlong.surprisal.robust_score import RobustScore
from lmlong.surprisal.token_bits import TokenBits

Unit = Literal["token", "byte", "line", "record", "position"]

NEWLINE = b"\n"

COUNTS = ("number", "place", "begin", "read", "size", "tokens")
"""What is kept of an open unit, and of the text before it, beside its bits and its beginning."""


class Surprise(NamedTuple):
    """What a unit of a text cost a model to predict."""

    source: str
    number: int  # of the unit in its text, from 1
    offset: int  # bytes of its text before it
    bytes: int  # of it, as read
    tokens: int  # that begin in it
    bits: float
    mean: float  # bits per byte of all that was scored so far
    z: float | None  # how unusual it is, against the units before it; None for the first few
    text: str  # its beginning

    @property
    def bits_per_byte(self) -> float | None:
        return self.bits / self.bytes if self.bytes else None


class Totals:
    """What was scored so far, of all texts together."""

    def __init__(self) -> None:
        self.bits, self.bytes, self.tokens = 0.0, 0, 0
        self.scores = RobustScore()

    def add(self, bits: float, size: int, tokens: int) -> None:
        self.bits, self.bytes, self.tokens = self.bits + bits, self.bytes + size, self.tokens + tokens

    def to_json(self) -> dict[str, Any]:
        return {"bits": self.bits, "bytes": self.bytes, "tokens": self.tokens, "scores": self.scores.to_json()}

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> "Totals":
        totals = cls()
        totals.add(float(saved["bits"]), int(saved["bytes"]), int(saved["tokens"]))
        totals.scores = RobustScore.from_json(saved["scores"])
        return totals


class Gaps:
    """Where the text that a model reads has other bytes than the input: what could not be decoded or has no token."""

    def __init__(self) -> None:
        self._ahead: deque[tuple[int, int]] = deque()  # places in the text, and bytes that the input has more there
        self._passed = 0

    def add(self, place: int, more: int) -> None:
        self._ahead.append((place, more))

    def read_bytes(self, place: int) -> int:
        """Return the bytes of the input before a place of the text; places only grow."""
        while self._ahead and self._ahead[0][0] < place:
            self._passed += self._ahead.popleft()[1]
        return place + self._passed

    def to_json(self) -> dict[str, Any]:
        return {"passed": self._passed, "ahead": list(self._ahead)}

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> "Gaps":
        gaps = cls()
        gaps._passed = int(saved["passed"])
        gaps._ahead.extend((int(place), int(more)) for place, more in saved["ahead"])
        return gaps


class Units:
    """The units of one text, made from its tokens as they come, in constant memory."""

    def __init__(self, tokenizer: Tokenizer, unit: Unit, source: str, totals: Totals, keep: int):
        self._tokenizer, self._unit, self._source = tokenizer, unit, source
        self._totals, self._keep, self._gaps = totals, keep, Gaps()
        self._number = 0
        self._place = self._begin = 0  # bytes of the text that were read, and those of the input before the open unit
        self._read = 0  # tokens of the text
        self._bits, self._size, self._tokens, self._text = 0.0, 0, 0, b""  # of the open unit
        self._has_newline = tokens_with(tokenizer, NEWLINE) if unit == "line" else None

    def add_gap(self, place: int, more: int) -> None:
        """Note that at a place of the text, which is not read yet, the input has so many bytes more."""
        self._gaps.add(place, more)

    def add(self, read: TokenBits) -> Iterator[Surprise]:
        """Iterate over the units that these tokens complete."""
        begin = 0
        for end in self._ends(read.tokens):
            self._extend(read.tokens[begin : end - 1], read.bits[begin : end - 1])
            yield from self._divide(int(read.tokens[end - 1]), float(read.bits[end - 1]))
            begin = end
        self._extend(read.tokens[begin:], read.bits[begin:])
        self._gaps.read_bytes(self._place)  # those of a unit that never ends would fill the memory

    def close(self) -> Iterator[Surprise]:
        """Iterate over the open unit, which ends here, if it has anything."""
        if self._size or self._tokens:
            yield self._complete()

    def to_json(self) -> dict[str, Any]:
        """Return the open unit, and where it begins."""
        return {name: getattr(self, f"_{name}") for name in COUNTS} | {
            "bits": self._bits,
            "text": self._text.hex(),
            "gaps": self._gaps.to_json(),
        }

    def restore(self, saved: dict[str, Any]) -> None:
        """Go on from what `to_json` was taken from; ValueError, KeyError or TypeError for anything else."""
        for name in COUNTS:
            setattr(self, f"_{name}", int(saved[name]))
        self._bits, self._text = float(saved["bits"]), bytes.fromhex(saved["text"])
        self._gaps = Gaps.from_json(saved["gaps"])

    def _ends(self, tokens: np.ndarray) -> list[int]:
        """Return the numbers of tokens after those at which a unit may end."""
        if self._unit in ("token", "byte"):
            return list(range(1, len(tokens) + 1))
        if self._unit == "line":
            assert self._has_newline is not None
            return (np.flatnonzero(self._has_newline[tokens]) + 1).tolist()
        if self._unit == "position":  # 2^n tokens of the text are before the end of a unit
            count = self._read + np.arange(1, len(tokens) + 1)
            return (np.flatnonzero(count & (count - 1) == 0) + 1).tolist()
        return []

    def _divide(self, token: int, bits: float) -> Iterator[Surprise]:
        """Add a token at or within which units end, and iterate over those that do."""
        data = self._tokenizer.decode_bytes([token])
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
        """Add tokens that are all of the open unit."""
        if not len(tokens):
            return
        self._tokens += len(tokens)
        self._read += len(tokens)
        room = self._keep - len(self._text)
        if room > 0:
            self._text += self._tokenizer.decode_bytes(tokens[:room].tolist())[:room]
        size = int(self._tokenizer.token_bytes[tokens].sum())
        self._size, self._place = self._size + size, self._place + size
        self._bits += float(bits.sum())

    def _put(self, data: bytes, bits: float) -> None:
        self._text += data[: max(self._keep - len(self._text), 0)]
        self._size, self._place = self._size + len(data), self._place + len(data)
        self._bits += bits

    def _complete(self) -> Surprise:
        end = self._gaps.read_bytes(self._place)
        size = end - self._begin
        totals = self._totals
        totals.add(self._bits, size, self._tokens)
        self._number += 1
        mean = totals.bits / totals.bytes if totals.bytes else 0.0
        z = totals.scores.add(compared(self._unit, self._bits, size))
        text = self._text.decode("utf-8", LOSSLESS)
        found = Surprise(self._source, self._number, self._begin, size, self._tokens, self._bits, mean, z, text)
        self._begin, self._bits, self._size, self._tokens, self._text = end, 0.0, 0, 0, b""
        return found


SHORT = 16
"""Bytes that are added to a unit's, so that one of a few bytes is not unusual for a rare byte among them."""


def compared(unit: Unit, bits: float, size: int) -> float:
    """Return by what a unit is compared with others: its bits for a byte, as long lines are no more unusual than short
    ones, where short ones count as longer than they are; of a token its bits, which are those of one choice."""
    return bits if unit == "token" else bits / (max(size, 0) + SHORT)


def tokens_with(tokenizer: Tokenizer, part: bytes) -> np.ndarray:
    """Return of each token whether it has these bytes in it (V,)."""
    return np.fromiter((part in tokenizer.decode_bytes([token]) for token in range(tokenizer.vocabulary)), dtype=bool)


def _parts(data: bytes, unit: Unit) -> list[bytes]:
    """Return a token's bytes, cut after each byte or newline; the last part may be empty."""
    if unit == "byte":
        return [data[place : place + 1] for place in range(len(data))] or [b""]
    if unit == "line":
        *lines, rest = data.split(NEWLINE)
        return [*(line + NEWLINE for line in lines), rest]
    return [data]
