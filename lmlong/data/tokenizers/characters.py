"""One token for each character of an alphabet, such as the bases of a genome.

Other characters in a text are an error, or become U+FFFD, depending on `unknown`.
"""

import json
from collections.abc import Iterable
from functools import cached_property
from typing import Literal

import numpy as np

from lmlong import recipe
from lmlong.data.document import Document
from lmlong.data.tokenizers.base import Tokenizer
from lmlong.data.tokenizers.boundaries import TokenBoundaries
from lmlong.errors import UsageError

SIGNATURE = b"lmlong characters"
HEADER = SIGNATURE + b" tokenizer: "
"""The beginning of a file of this kind; its options follow as JSON."""

REPLACEMENT, NEWLINE = "\ufffd", "\n"
SHOWN = 10
"""The maximum number of characters that an error message names."""

Unknown = Literal["error", "replace"]


class UnknownCharacter(UsageError):
    """A character that is not in the alphabet of a tokenizer; `to_client` is the message for a client of a server."""

    def __init__(self, character: str, position: str, characters: Iterable[str] = ()):
        self.to_client = f"{position}: {_shown(character)} is not in the alphabet of this model."
        more = [_shown(other) for other in sorted(set(characters) - {character})]
        beside = f", nor are {', '.join(more[:SHOWN])}{', ...' if len(more) > SHOWN else ''}" if more else ""
        super().__init__(
            f"{position}: {_shown(character)} is not in the alphabet of the tokenizer{beside}. Add the characters "
            "that belong to the text to text.tokenizer.alphabet, or set text.tokenizer.unknown=replace."
        )


class CharacterTokenizer(Tokenizer):
    """One token for each character of an alphabet, in its order, then one for U+FFFD if `unknown` is replace."""

    def __init__(self, alphabet: str, unknown: Unknown = "error"):
        self.alphabet, self.unknown = alphabet, unknown
        self.characters = alphabet + REPLACEMENT * (unknown == "replace" and REPLACEMENT not in alphabet)
        table = [character.encode("utf-8", "surrogatepass") for character in self.characters]
        file = HEADER + json.dumps({"alphabet": alphabet, "unknown": unknown}).encode() + b"\n"
        super().__init__(file, [*table, b"", b""], bos=len(table), eos=len(table) + 1)
        self.replacement = self.characters.index(REPLACEMENT) if unknown == "replace" else None
        self._token_of = np.full(max(map(ord, self.characters)) + 2, -1, np.int64)  # last: all others
        self._token_of[[ord(character) for character in self.characters]] = np.arange(len(self.characters))

    @cached_property
    def boundaries(self) -> TokenBoundaries:
        """Boundaries without pieces of several characters: no text changes the tokens before it."""
        return TokenBoundaries([], self.encode_part)

    def representable(self, text: str) -> str:
        if self.replacement is None:
            return text
        return "".join(self.characters[token] for token in self.encode_part(text))

    def count_replaced(self, text: str, document: Document) -> int:
        outside = len(self._outside(text))
        if outside and self.unknown == "error":
            raise self._unknown_in(document)
        return outside

    def _outside(self, text: str) -> np.ndarray:
        """Return the positions of the characters that are not in the alphabet."""
        return np.flatnonzero(self._lookup(text) < 0)

    def _unknown_in(self, document: Document) -> UnknownCharacter:
        """Read a document that has characters outside the alphabet, and return the error that names their first
        position and all of them."""
        first, line, before = None, 1, 0
        characters: set[str] = set()
        for piece in document.pieces():
            outside = self._outside(piece)
            if len(outside) and first is None:
                start = piece[: outside[0]]
                column = _after_newline(start, before) + 1
                position = f"{document.name}: line {line + start.count(NEWLINE):,}, character {column:,}"
                first = (piece[outside[0]], position)
            line, before = line + piece.count(NEWLINE), _after_newline(piece, before)
            characters.update(piece[index] for index in outside)
        assert first is not None, "the caller found one"
        return UnknownCharacter(*first, characters)

    def encode_part(self, text: str) -> list[int]:
        tokens = self._lookup(text)
        if len(tokens) and tokens.min() < 0:
            outside = np.flatnonzero(tokens < 0)
            if self.replacement is None:
                characters = {text[index] for index in outside}
                raise UnknownCharacter(text[outside[0]], f"character {outside[0] + 1:,}", characters)
            tokens[outside] = self.replacement
        return tokens.tolist()

    def _lookup(self, text: str) -> np.ndarray:
        """Return the token of each character, or -1."""
        points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
        return self._token_of[np.minimum(points, len(self._token_of) - 1)]


def load_characters(file: bytes, name: str) -> CharacterTokenizer:
    """Return the tokenizer of a file that `Tokenizer.save` wrote."""
    try:
        options = recipe.Tokenizer.model_validate({"kind": "characters", **json.loads(file.removeprefix(HEADER))})
        tokenizer = CharacterTokenizer(options.alphabet or "", options.unknown)
        damaged = tokenizer.file != file
    except (ValueError, TypeError, RecursionError):
        damaged = True
    if damaged:
        raise UsageError(
            f"{name}: a damaged tokenizer of characters. Create it again with `lmlong data train-tokenizer`."
        )
    return tokenizer


def _shown(character: str) -> str:
    """Return a character and its code point for an error message."""
    return f"{character!r} (U+{ord(character):04X})"


def _after_newline(piece: str, before: int) -> int:
    """Return the number of characters since the last newline, if `before` characters preceded this piece."""
    newline = piece.rfind(NEWLINE)
    return before + len(piece) if newline < 0 else len(piece) - newline - 1
