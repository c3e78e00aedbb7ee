"""The tokens of a text as a cycle in which documents begin at multiples of a factor, with padding between them.

bos and eos may be the same token, as in many models. It ends a document if the same token follows, otherwise it begins
one.
"""

from typing import NamedTuple

import numpy as np

IGNORED = -100
"""The target of the last token of a document, and of padding: there is nothing to predict."""


class Row(NamedTuple):
    """Tokens in reading order, and the next token of each as its target. Padding is eos."""

    tokens: np.ndarray  # (time,) int64
    targets: np.ndarray  # (time,) int64, IGNORED at the end of a document
    document_starts: np.ndarray  # (time,) bool, whether the state is reset


class CyclicTokens:
    """The first `count` tokens of a text, or all, as a cycle: the first follows the last. `starts`: the positions of
    its documents."""

    def __init__(
        self, tokens: np.ndarray, starts: np.ndarray, bos: int, eos: int, factor: int = 1, count: int | None = None
    ):
        self.tokens, self.bos, self.eos, self.factor = tokens, bos, eos, factor
        self.begins = starts if len(starts) and starts[0] == 0 else np.concatenate([[0], starts])  # in the text
        self.sizes = np.diff(self.begins, append=len(tokens) if count is None else count)
        self.offsets = np.concatenate([[0], round_up(self.sizes, factor).cumsum()])  # of the documents in the cycle

    def __len__(self) -> int:
        return int(self.offsets[-1])

    def row(self, begin: int, end: int) -> Row:
        """Return the row from one position in the cycle to another."""
        positions = np.arange(begin, end) % len(self)
        document = np.searchsorted(self.offsets, positions, side="right") - 1
        within = positions - self.offsets[document]
        return self._row_at(self.begins[document] + within, within < self.sizes[document])

    def piece(self, begin: int, end: int) -> Row:
        """Return the tokens from one position in the text to another, padded to a multiple of the factor."""
        at = np.arange(begin, begin + int(round_up(np.array(end - begin), self.factor)))
        return self._row_at(at, at < end)

    def _row_at(self, at: np.ndarray, real: np.ndarray) -> Row:
        """Return the tokens at positions in the text, with their targets, and padding if `real` is False."""
        tokens, targets = (self.tokens.take(at + ahead, mode="wrap").astype(np.int64) for ahead in (0, 1))
        tokens = np.where(real, tokens, self.eos)
        ends = ~real | (tokens == self.eos) & (targets == self.bos)
        return Row(tokens, np.where(ends, IGNORED, targets), real & ~ends & (tokens == self.bos))


def round_up(sizes: np.ndarray, factor: int) -> np.ndarray:
    """Return each size rounded up to a multiple of the factor."""
    return -(-sizes // factor) * factor
