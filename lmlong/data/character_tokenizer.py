"""One token for each character of an alphabet, such as the bases of a genome.

A text with other characters is refused, or has U+FFFD in their place, by `unknown`.
"""

import json
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Literal

import numpy as np

from lmlong import recipe
from lmlong.data.reading import Document
from lmlong.data.token_boundaries import TokenBoundaries
from lmlong.data.tokenizer import Tokenizer
from lmlong.errors import UsageError

BEGINNING = b"lmlong characters tokenizer: "
"""How a file of this kind begins; its options follow as JSON."""

REPLACEMENT, NEWLINE = "\ufffd", "\n"
SHOWN = 10
"""Most characters that one message names."""

Unknown = Literal["error", "replace"]


class UnknownCharacter(UsageError):
    """A character that the alphabet of a tokenizer lacks."""

    def __init__(self, character: str, place: str, others: Iterable[str] = ()):
        self.to_a_client = f"{place}: {named(character)} is not in the alphabet of this model."
        more = [named(other) for other in sorted(set(others) - {character})]
        beside = f", nor are {', '.join(more[:SHOWN])}{', ...' if len(more) > SHOWN else ''}" if more else ""
        super().__init__(
            f"{place}: {named(character)} is not in the alphabet of the tokenizer{beside}. Add to "
            "text.tokenizer.alphabet what belongs to the text, or set text.tokenizer.unknown=replace."
        )


class CharacterTokenizer(Tokenizer):
    """One token for each character of an alphabet, in its order; then, where others are replaced, U+FFFD."""

    def __init__(self, alphabet: str, unknown: Unknown = "error"):
        self.alphabet, self.unknown = alphabet, unknown
        known = alphabet + REPLACEMENT * (unknown == "replace" and REPLACEMENT not in alphabet)
        table = [character.encode("utf-8", "surrogatepass") for character in known]
        file = BEGINNING + json.dumps({"alphabet": alphabet, "unknown": unknown}).encode() + b"\n"
        super().__init__(file, [*table, b"", b""], bos=len(table), eos=len(table) + 1)
        self.characters = known
        """The characters by their tokens."""
        self.replacement = known.index(REPLACEMENT) if unknown == "replace" else None
        self._token_of = np.full(max(map(ord, known)) + 2, -1, np.int64)  # the last stands for all beyond
        self._token_of[[ord(character) for character in known]] = np.arange(len(known))

    @cached_property
    def boundaries(self) -> TokenBoundaries:
        """Nothing: no text changes the tokens before it, in whatever number of bytes its characters are written."""
        return TokenBoundaries([], self.encode_part)

    def encode_part(self, text: str) -> list[int]:
        return self._tokens(text, 0).tolist()

    def encode_pieces(self, pieces: Iterable[str]) -> Iterator[np.ndarray]:
        before = 0
        for piece in filter(None, pieces):
            yield self._tokens(piece, before)
            before += len(piece)

    def representable(self, text: str) -> str:
        if self.replacement is None:
            return text
        return "".join(self.characters[token] for token in self.encode_part(text))

    def outside(self, text: str) -> np.ndarray:
        """Return the places of the characters that the alphabet lacks."""
        return np.flatnonzero(self._lookup(text) < 0)

    def unknown_in(self, document: Document) -> UnknownCharacter:
        """Return the error of a document with characters that the alphabet lacks, which is read for the place of the
        first one and for all others."""
        first, line, before = None, 1, 0
        others: set[str] = set()
        for piece in document.pieces():
            outside = self.outside(piece)
            if len(outside) and first is None:
                start = piece[: outside[0]]
                column = _after_newline(start, before) + 1
                place = f"{document.name}: line {line + start.count(NEWLINE):,}, character {column:,}"
                first = (piece[outside[0]], place)
            line, before = line + piece.count(NEWLINE), _after_newline(piece, before)
            others.update(piece[place] for place in outside)
        assert first is not None, "it was looked at before"
        return UnknownCharacter(*first, others)

    def _tokens(self, text: str, before: int) -> np.ndarray:
        """Return the tokens of a text after so many other characters."""
        tokens = self._lookup(text)
        if len(tokens) and tokens.min() < 0:
            outside = np.flatnonzero(tokens < 0)
            if self.replacement is None:
                others = {text[place] for place in outside}
                raise UnknownCharacter(text[outside[0]], f"character {before + outside[0] + 1:,}", others)
            tokens[outside] = self.replacement
        return tokens

    def _lookup(self, text: str) -> np.ndarray:
        """Return the token of each character, or -1."""
        points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
        return self._token_of[np.minimum(points, len(self._token_of) - 1)]


def load(file: bytes, name: str) -> CharacterTokenizer:
    """Return the tokenizer of a file written by `save`."""
    try:
        options = recipe.Tokenizer.model_validate({"kind": "characters", **json.loads(file.removeprefix(BEGINNING))})
        tokenizer = CharacterTokenizer(options.alphabet or "", options.unknown)
        damaged = tokenizer.file != file
    except (ValueError, TypeError, RecursionError):
        damaged = True
    if damaged:
        raise UsageError(f"{name}: a damaged characters tokenizer. Make it again, by `lmlong tokenizer train`.")
    return tokenizer


def named(character: str) -> str:
    """Return a character as an error message shows it."""
    return f"{character!r} (U+{ord(character):04X})"


def _after_newline(piece: str, before: int) -> int:
    """Return how many characters follow the last newline, `before` of which came before this piece."""
    newline = piece.rfind(NEWLINE)
    return before + len(piece) if newline < 0 else len(piece) - newline - 1
