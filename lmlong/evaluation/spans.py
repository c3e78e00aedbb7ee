"""Spans of documents, each read from an empty state: the tokens to score, and those read before them."""

from typing import NamedTuple

import numpy as np

from lmlong.data.token_file import TokenFile
from lmlong.evaluation.document_sums import Sums

BLOCK = 640
"""Most targets side by side where contexts are compared: one reading of a long context serves all of them."""

GOLDEN = (5**0.5 - 1) / 2
"""Steps of this share of a whole, taken round and round, never gather anywhere."""


class Documents(NamedTuple):
    """The positions of the documents in a text."""

    begins: np.ndarray  # (documents,) place of each document's bos
    ends: np.ndarray  # (documents,) place after its last token
    cluster: np.ndarray | None = None  # (documents,) number of each one's cluster; None where each is its own

    @property
    def sizes(self) -> np.ndarray:
        return self.ends - self.begins

    def sums(self) -> Sums:
        """Return sums to add to."""
        return Sums(len(self.begins), self.cluster)


class Targets(NamedTuple):
    """Single tokens to score."""

    document: np.ndarray  # (targets,) number of the document
    place: np.ndarray  # (targets,) in the text
    begin: np.ndarray  # (targets,) place of the first token that is read before it


class Spans(NamedTuple):
    """Tokens from `begin` on are read; those from `first` up to `end` are targets, each given what was read before."""

    document: np.ndarray  # (spans,) number of the document
    begin: np.ndarray  # (spans,)
    first: np.ndarray  # (spans,) after begin
    end: np.ndarray  # (spans,) after first

    def take(self, which: np.ndarray) -> "Spans":
        return Spans(*(values[which] for values in self))

    def targets(self) -> Targets:
        """Return the targets of all spans, one span after the other."""
        counts = self.end - self.first
        within = np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)
        place = np.repeat(self.first, counts) + within
        return Targets(np.repeat(self.document, counts), place, np.repeat(self.begin, counts))


class Blocks(NamedTuple):
    """Targets that all have as much text before them as the longest context takes."""

    document: np.ndarray  # (blocks,)
    first: np.ndarray  # (blocks,) place of the first target
    size: int

    def after(self, context: int) -> Spans:
        """Return the same targets with so many tokens before them, at most half as many again before the last of a
        span: in a short context a block is several spans, in a long one it is read at once."""
        size = block_size(context)
        firsts = self.first[:, None] + np.arange(0, self.size, size)
        ends = np.minimum(firsts + size, self.first[:, None] + self.size).ravel()
        return Spans(np.repeat(self.document, firsts.shape[1]), firsts.ravel() - context, firsts.ravel(), ends)


def documents_of(text: TokenFile, cluster: np.ndarray | None = None) -> Documents:
    """Return the documents of two tokens or more: a shorter one has no target. `cluster` is of all documents."""
    begins = np.asarray(text.starts, dtype=np.int64)
    ends = np.append(begins[1:], len(text.tokens))
    kept = ends - begins >= 2
    return Documents(begins[kept], ends[kept], None if cluster is None else cluster[kept])


def block_size(context: int) -> int:
    """Return the most targets of one span: the last of them has at most half as much context again as the first."""
    return max(1, min(BLOCK, context // 2))


def reached(documents: Documents, length: int, size: int | None = None) -> int:
    """Return how many documents have so many targets with so much context, by default a block of them."""
    return int((documents.sizes >= length + (block_size(length) if size is None else size)).sum())


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
    cluster = None if documents.cluster is None else documents.cluster[document]
    return Documents(begins + number * sizes // counts, begins + (number + 1) * sizes // counts, cluster)


def choose_blocks(documents: Documents, longest: int, size: int, targets: int, least: int) -> Blocks:
    """Return about so many targets with at least `longest` tokens before them, evenly over documents and positions;
    a block in each of `least` documents, if that makes more."""
    room = np.maximum(documents.sizes - longest, 0) // size  # blocks that fit side by side
    eligible = np.flatnonzero(room)
    wanted = max(1, least, targets // size)
    if len(eligible) > wanted:
        eligible = eligible[np.arange(wanted) * len(eligible) // wanted]
    numbers, firsts = [], []
    for number, document in enumerate(eligible):
        count = min(max(1, wanted // len(eligible)), room[document])
        # each document begins elsewhere, else one block of each would tell of beginnings alone
        positions = ((np.arange(count) + number * GOLDEN % 1) * room[document] / count).astype(np.int64)
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
