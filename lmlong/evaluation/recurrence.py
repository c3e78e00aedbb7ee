"""How far back the same token, and the same word, last occurred in the document: what a memory could find.

A word is a run of bytes that are no ASCII space, as the text has it, across the borders of tokens. A token belongs to
the word of its first such byte; one without any (spaces, bos, eos) is a word of its own. From a word to the one before
is as far as from the token that has its first byte to the token that has the first byte of the other.
"""

import re
from typing import Literal, get_args

import numpy as np

from lmlong.data.tokenizers.base import Tokenizer
from lmlong.evaluation.spans import Documents, Targets

Kind = Literal["token", "word"]
KINDS: tuple[Kind, ...] = get_args(Kind)

LIMITS = (64, 512, 4096, 32_768)
BUCKETS = ("never", "< 64", "< 512", "< 4k", "< 32k", "beyond")

WORD = re.compile(rb"\S+")
SPACES = np.frombuffer(b" \t\n\r\x0b\x0c", np.uint8)


def buckets(kind: Kind, text: np.ndarray, documents: Documents, targets: Targets, tokenizer: Tokenizer) -> np.ndarray:
    """Return the number of each target's bucket."""
    found = np.zeros(len(targets.place), dtype=np.int64)
    for document in np.unique(targets.document):
        inside = targets.document == document
        begin, end = documents.begins[document], documents.ends[document]
        tokens = np.asarray(text[begin:end])
        distance = last_same(tokens) if kind == "token" else last_same_word(tokens, tokenizer)
        found[inside] = bucket_of(distance[targets.place[inside] - begin])
    return found


def bucket_of(distance: np.ndarray) -> np.ndarray:
    """Return the numbers of the buckets of some distances, where 0 is never."""
    return np.where(distance == 0, 0, 1 + np.searchsorted(LIMITS, distance, side="right"))


def last_same(values: np.ndarray) -> np.ndarray:
    """Return for each value how many places before it the same one last stood, 0 where it did not."""
    return _back_to_same(values, np.arange(len(values)))


def last_same_word(tokens: np.ndarray, tokenizer: Tokenizer) -> np.ndarray:
    """Return for each token how many tokens before its word the same word last began, 0 where it did not."""
    data = tokenizer.decode_bytes(tokens.tolist())
    ends = tokenizer.token_bytes[tokens].cumsum()
    names: dict[bytes, int] = {}
    words = [(match.start(), names.setdefault(match[0], len(names))) for match in WORD.finditer(data)]
    begins, name = np.array(words, dtype=np.int64).reshape(-1, 2).T
    of_word = _back_to_same(name, np.searchsorted(ends, begins, side="right"))

    letters = np.flatnonzero(~np.isin(np.frombuffer(data, np.uint8), SPACES))
    letters = np.append(letters, len(data))  # a token after the last letter has none
    letter = letters[np.searchsorted(letters, ends - tokenizer.token_bytes[tokens])]  # the first one from its begin on
    found, has_letter = last_same(tokens), letter < ends
    found[has_letter] = of_word[np.searchsorted(begins, letter[has_letter], side="right") - 1]
    return found


def _back_to_same(values: np.ndarray, place: np.ndarray) -> np.ndarray:
    """Return for each value how far before its place the same one last had its own, at least 1; 0 where none did."""
    order = np.argsort(values, kind="stable")
    same = values[order[1:]] == values[order[:-1]]
    found = np.zeros(len(values), dtype=np.int64)
    found[order[1:][same]] = np.maximum(1, place[order[1:]] - place[order[:-1]])[same]
    return found
