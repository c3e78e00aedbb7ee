"""Distances to the same token and the same word, against brute force and against sources where they are known."""

import numpy as np
import pytest

from lmlong.data.tokenizers.base import ByteTokenizer, Tokenizer
from lmlong.evaluation import recurrence
from lmlong.evaluation.recurrence import BUCKETS, bucket_of, last_same, last_same_word
from lmlong.evaluation.spans import Documents, Targets


class Pieces(Tokenizer):
    """A tokenizer of any pieces."""

    def __init__(self, pieces: list[bytes]):
        super().__init__(b"", [*pieces, b"", b""], len(pieces), len(pieces) + 1)

    def encode_part(self, text: str) -> list[int]:
        raise NotImplementedError


def by_definition(tokens: list[int], tokenizer: Tokenizer) -> list[int]:
    """The distance of each token to the same word, byte by byte."""
    owner, data = [], b""
    for number, token in enumerate(tokens):
        piece = tokenizer.decode_bytes([token])
        owner += [number] * len(piece)
        data += piece
    word, words = [-1] * len(data), []  # words: their bytes, and the token in which they begin
    for place in range(len(data)):
        if not data[place : place + 1].isspace():
            if place and word[place - 1] >= 0:
                word[place] = word[place - 1]
                words[-1] = words[-1][0] + data[place : place + 1], words[-1][1]
            else:
                word[place] = len(words)
                words.append((data[place : place + 1], owner[place]))
    found = []
    for number, token in enumerate(tokens):
        mine = [word[place] for place in range(len(data)) if owner[place] == number and word[place] >= 0]
        if mine:
            name, begin = words[mine[0]]
            before = [max(1, begin - other) for same, other in words[: mine[0]] if same == name]
        else:
            before = [number - place for place in range(number) if tokens[place] == token]
        found.append(before[-1] if before else 0)
    return found


@pytest.mark.parametrize("seed", range(20))
def test_words_are_told_as_the_definition_says(seed: int) -> None:
    tokenizer = Pieces([b"a", b" a", b"b", b" ", b"\n", b"b a", b"a b ", b" a a", b"\xe2\x80", b"  "])
    tokens = np.random.default_rng(seed).integers(12, size=60)
    assert last_same_word(tokens, tokenizer).tolist() == by_definition(tokens.tolist(), tokenizer)


def test_the_same_token_is_found_where_it_last_stood() -> None:
    values = np.random.default_rng(0).integers(30, size=400)
    expected = [next((back for back in range(1, n + 1) if values[n - back] == values[n]), 0) for n in range(400)]
    assert last_same(values).tolist() == expected


def test_no_text_and_no_words_have_no_word_before() -> None:
    assert last_same_word(np.zeros(0, np.int64), ByteTokenizer()).tolist() == []
    assert last_same_word(np.array([256, 32, 32, 257]), ByteTokenizer()).tolist() == [0, 0, 1, 0]


def test_the_borders_of_buckets() -> None:
    distance = np.array([0, 1, 63, 64, 511, 512, 4095, 4096, 32_767, 32_768, 10**9])
    names = [BUCKETS[number] for number in bucket_of(distance)]
    assert names == ["never"] + ["< 64"] * 2 + ["< 512"] * 2 + ["< 4k"] * 2 + ["< 32k"] * 2 + ["beyond"] * 2


def test_nothing_is_found_in_another_document() -> None:
    text = np.tile(np.arange(10), 30)
    documents = Documents(np.array([0, 95, 205]), np.array([95, 205, 300]))
    place = np.array([3, 13, 95, 104, 105, 299])
    targets = Targets(np.array([0, 0, 1, 1, 1, 2]), place, place)
    found = recurrence.buckets("token", text, documents, targets, ByteTokenizer())
    assert [BUCKETS[number] for number in found] == ["never", "< 64", "never", "never", "< 64", "< 64"]
