"""The distance to the last occurrence of the same token, or the same word, in the document.

A word is a run of bytes other than ASCII spaces, across the boundaries of tokens. A token belongs to the word of its
first such byte; a token without one (spaces, bos, eos) is a word of its own. The distance of two words is that of the
tokens with their first bytes.
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
    """Return the bucket of each target, as its index in BUCKETS."""
    bucket = np.zeros(len(targets.position), dtype=np.int64)
    for document in np.unique(targets.document):
        inside = targets.document == document
        begin, end = documents.begins[document], documents.ends[document]
        tokens = np.asarray(text[begin:end])
        distance = last_same(tokens) if kind == "token" else last_same_word(tokens, tokenizer)
        bucket[inside] = bucket_of(distance[targets.position[inside] - begin])
    return bucket


def bucket_of(distance: np.ndarray) -> np.ndarray:
    """Return the buckets of some distances, where 0 stands for never."""
    return np.where(distance == 0, 0, 1 + np.searchsorted(LIMITS, distance, side="right"))


def last_same(values: np.ndarray) -> np.ndarray:
    """Return for each value the distance to its last occurrence, 0 for the first."""
    return _back_to_same(values, np.arange(len(values)))


def last_same_word(tokens: np.ndarray, tokenizer: Tokenizer) -> np.ndarray:
    """Return for each token the distance in tokens from its word to the last occurrence of it, 0 for the first."""
    data = tokenizer.decode_bytes(tokens.tolist())
    ends = tokenizer.token_bytes[tokens].cumsum()
    names: dict[bytes, int] = {}
    words = [(match.start(), names.setdefault(match[0], len(names))) for match in WORD.finditer(data)]
    begins, name = np.array(words, dtype=np.int64).reshape(-1, 2).T
    of_word = _back_to_same(name, np.searchsorted(ends, begins, side="right"))

    letters = np.flatnonzero(~np.isin(np.frombuffer(data, np.uint8), SPACES))
    letters = np.append(letters, len(data))  # a token after the last letter has no letter
    letter = letters[np.searchsorted(letters, ends - tokenizer.token_bytes[tokens])]  # the first one in the token
    distance, has_letter = last_same(tokens), letter < ends
    distance[has_letter] = of_word[np.searchsorted(begins, letter[has_letter], side="right") - 1]
    return distance


def _back_to_same(values: np.ndarray, position: np.ndarray) -> np.ndarray:
    """Return for each value the distance in positions to its last occurrence, at least 1; 0 for the first."""
    order = np.argsort(values, kind="stable")
    same = values[order[1:]] == values[order[:-1]]
    distance = np.zeros(len(values), dtype=np.int64)
    distance[order[1:][same]] = np.maximum(1, position[order[1:]] - position[order[:-1]])[same]
    return distance
