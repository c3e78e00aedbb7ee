"""Spans of documents, each read from an empty state: the tokens to score, and those read before them."""

from typing import NamedTuple

import numpy as np

from lmlong.data.token_file import TokenFile
from lmlong.evaluation.document_sums import Sums

BLOCK = 640
"""Largest number of adjacent targets that share one reading of their context."""

GOLDEN = (5**0.5 - 1) / 2
"""Multiples of this, modulo 1, are spread evenly."""


class Documents(NamedTuple):
    """The positions of the documents in a text."""

    begins: np.ndarray  # (documents,) index of each document's bos
    ends: np.ndarray  # (documents,) index after its last token

    @property
    def sizes(self) -> np.ndarray:
        return self.ends - self.begins

    def sums(self) -> Sums:
        """Return empty sums of these documents."""
        return Sums(len(self.begins))


class Spans(NamedTuple):
    """Tokens from `begin` are read; those from `first` to `end` are targets, each given all tokens read before it."""

    document: np.ndarray  # (spans,) number of the document
    begin: np.ndarray  # (spans,)
    first: np.ndarray  # (spans,) after begin
    end: np.ndarray  # (spans,) after first

    def take(self, which: np.ndarray) -> "Spans":
        return Spans(*(values[which] for values in self))


class Blocks(NamedTuple):
    """Targets that all have at least the longest context before them."""

    document: np.ndarray  # (blocks,)
    first: np.ndarray  # (blocks,) index of the first target
    size: int

    def after(self, context: int) -> Spans:
        """Return the same targets with `context` tokens before them, and up to half as many again before the last of a
        span: with a short context a block is several spans, with a long one it is read at once."""
        size = block_size(context)
        firsts = self.first[:, None] + np.arange(0, self.size, size)
        ends = np.minimum(firsts + size, self.first[:, None] + self.size).ravel()
        return Spans(np.repeat(self.document, firsts.shape[1]), firsts.ravel() - context, firsts.ravel(), ends)


def documents_of(text: TokenFile) -> Documents:
    """Return the documents of two tokens or more, since shorter ones have no target."""
    begins = np.asarray(text.starts, dtype=np.int64)
    ends = np.append(begins[1:], len(text.tokens))
    kept = ends - begins >= 2
    return Documents(begins[kept], ends[kept])


def block_size(context: int) -> int:
    """Return the largest number of targets in a span: the last has at most half as much context again as the first."""
    return max(1, min(BLOCK, context // 2))


def reached(documents: Documents, length: int, size: int | None = None) -> int:
    """Return the number of documents with `size` targets, by default a block, that have `length` tokens before them."""
    return int((documents.sizes >= length + (block_size(length) if size is None else size)).sum())


def parts(documents: Documents, shortest: int, least: int) -> Documents | None:
    """Return documents cut into at least `least` parts of `shortest` tokens or more, each as long as possible; None if
    the text is too short."""
    if int((documents.sizes // shortest).sum()) < least:
        return None
    low, high = shortest, int(documents.sizes.max())
    while low < high:  # the greatest length that gives enough parts
        middle = (low + high + 1) // 2
        low, high = (middle, high) if int((documents.sizes // middle).sum()) >= least else (low, middle - 1)
    counts = np.maximum(documents.sizes // low, 1)
    document = np.repeat(np.arange(len(counts)), counts)
    number = np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)
    begins, sizes, counts = documents.begins[document], documents.sizes[document], counts[document]
    return Documents(begins + number * sizes // counts, begins + (number + 1) * sizes // counts)


def choose_blocks(documents: Documents, longest: int, size: int, targets: int, least: int) -> Blocks:
    """Return about `targets` targets with at least `longest` tokens before them, spread over documents and positions;
    or a block in each of `least` documents, if that is more."""
    room = np.maximum(documents.sizes - longest, 0) // size  # blocks that fit side by side
    eligible = np.flatnonzero(room)
    blocks = max(1, least, targets // size)
    if len(eligible) > blocks:
        eligible = eligible[np.arange(blocks) * len(eligible) // blocks]
    numbers, firsts = [], []
    for number, document in enumerate(eligible):
        count = min(max(1, blocks // len(eligible)), room[document])
        # an offset for each document, or single blocks would all be at the beginnings
        positions = ((np.arange(count) + number * GOLDEN % 1) * room[document] / count).astype(np.int64)
        numbers.append(np.full(count, document))
        firsts.append(documents.begins[document] + longest + positions * size)
    return Blocks(np.concatenate(numbers), np.concatenate(firsts), size)


def whole(documents: Documents) -> Spans:
    """Return each document as one span."""
    return Spans(np.arange(len(documents.begins)), documents.begins, documents.begins + 1, documents.ends)
