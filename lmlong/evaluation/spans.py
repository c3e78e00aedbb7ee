"""Spans of documents, each read from an empty state: the tokens to score, and those read before them."""

from typing import NamedTuple

import numpy as np

from lmlong.data.token_file import TokenFile

BLOCK = 256
"""Most targets of one span where contexts are compared: the first has just the context asked for, the last so many
tokens more."""


class Documents(NamedTuple):
    """The positions of the documents in a text."""

    begins: np.ndarray  # (documents,) place of each document's bos
    ends: np.ndarray  # (documents,) place after its last token

    @property
    def sizes(self) -> np.ndarray:
        return self.ends - self.begins


class Spans(NamedTuple):
    """Tokens from `begin` on are read; those from `first` up to `end` are targets, each given what was read before."""

    document: np.ndarray  # (spans,) number of the document
    begin: np.ndarray  # (spans,)
    first: np.ndarray  # (spans,) after begin
    end: np.ndarray  # (spans,) after first

    def take(self, which: np.ndarray) -> "Spans":
        return Spans(*(values[which] for values in self))


class Blocks(NamedTuple):
    """Targets that all have as much text before them as the longest context takes."""

    document: np.ndarray  # (blocks,)
    first: np.ndarray  # (blocks,) place of the first target
    size: int

    def after(self, context: int) -> Spans:
        """Return the same targets with so many tokens before them."""
        return Spans(self.document, self.first - context, self.first, self.first + self.size)


def documents_of(text: TokenFile) -> Documents:
    """Return the documents of two tokens or more: a shorter one has no target."""
    begins = np.asarray(text.starts, dtype=np.int64)
    ends = np.append(begins[1:], len(text.tokens))
    kept = ends - begins >= 2
    return Documents(begins[kept], ends[kept])


def block_size(shortest: int) -> int:
    """Return the targets in one block: the last of them has at most half as much context again as the first."""
    return max(1, min(BLOCK, shortest // 2))


def reached(documents: Documents, length: int, size: int) -> int:
    """Return how many documents have a block of targets with so much context."""
    return int((documents.sizes >= length + size).sum())


def parts(documents: Documents, shortest: int, least: int) -> Documents | None:
    """Return documents cut into at least `least` parts of `shortest` tokens or more, each as long as may be; None where
    the text is too short for them."""
    if int((documents.sizes // shortest).sum()) < least:
        return None
    low, high = shortest, int(documents.sizes.max())
    while low < high:  # the longest parts of which there are enough
        middle = (low + high + 1) // 2
        low, high = (middle, high) if int((documents.sizes // middle).sum()) >= least else (low, middle - 1)
    counts = np.maximum(documents.sizes // low, 1)
    document = np.repeat(np.arange(len(counts)), counts)
    number = np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)
    begins, sizes, counts = documents.begins[document], documents.sizes[document], counts[document]
    return Documents(begins + number * sizes // counts, begins + (number + 1) * sizes // counts)


def choose_blocks(documents: Documents, longest: int, size: int, targets: int, least: int) -> Blocks:
    """Return about so many targets with at least `longest` tokens before them, evenly over documents and positions;
    a block in each of `least` documents, if that makes more."""
    room = np.maximum(documents.sizes - longest, 0) // size  # blocks that fit side by side
    eligible = np.flatnonzero(room)
    wanted = max(1, least, targets // size)
    if len(eligible) > wanted:
        eligible = eligible[np.arange(wanted) * len(eligible) // wanted]
    numbers, firsts = [], []
    for document in eligible:
        count = min(max(1, wanted // len(eligible)), room[document])
        positions = np.arange(count) * room[document] // count
        numbers.append(np.full(count, document))
        firsts.append(documents.begins[document] + longest + positions * size)
    return Blocks(np.concatenate(numbers), np.concatenate(firsts), size)


def whole(documents: Documents) -> Spans:
    """Return each document as one span."""
    return Spans(np.arange(len(documents.begins)), documents.begins, documents.begins + 1, documents.ends)


def windows(documents: Documents, length: int) -> Spans:
    """Return adjacent windows, each read from an empty state."""
    return _tiled(documents, step=length, length=length)


def sliding(documents: Documents, length: int) -> Spans:
    """Return windows that overlap by half, so that a target has from half a window to a whole one before it."""
    return _tiled(documents, step=max(1, length // 2), length=length)


def _tiled(documents: Documents, step: int, length: int) -> Spans:
    """Return all tokens but the first of each document, `step` targets at a time, at the end of a window."""
    counts = -(-(documents.sizes - 1) // step)
    document = np.repeat(np.arange(len(counts)), counts)
    within = np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)
    first = documents.begins[document] + 1 + within * step
    begin = np.maximum(documents.begins[document], first + step - 1 - length)
    return Spans(document, begin, first, np.minimum(first + step, documents.ends[document]))
