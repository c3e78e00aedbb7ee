"""What is known of the tokens at the end of a text holds for whatever follows."""

import pytest

from lmlong import recipe
from lmlong.data.tokenizers import train_tokenizer
from lmlong.data.tokenizers.base import ByteTokenizer, Tokenizer
from lmlong.data.tokenizers.boundaries import settled
from lmlong.data.tokenizers.characters import CharacterTokenizer

from .conftest import sentences

TEXT = sentences(21)[20][:1500]


@pytest.fixture(params=["bpe", "unigram"], scope="module")
def subwords(request: pytest.FixtureRequest) -> Tokenizer:
    return train_tokenizer(sentences(20), recipe.Tokenizer(vocabulary=600, algorithm=request.param))


def test_few_tokens_are_left_open(subwords: Tokenizer) -> None:
    left = []
    for cut in range(100, 400):
        covers = subwords.boundaries.covers(TEXT[:cut])
        left.append(len(covers[0].tokens) - settled(covers))
    assert 0 < sum(left) / len(left) < 4


def test_pieces_are_found_by_their_beginning(subwords: Tokenizer) -> None:
    for head in (b" ", b"re", b"sel", " é".encode(), b"\n  ", b"qqq"):
        expected = [
            token
            for token in range(subwords.vocabulary)
            if (data := subwords.decode_bytes([token])).startswith(head) and len(data) > len(head)
        ]
        assert sorted(subwords.boundaries.tokens_beginning_with(head).tolist()) == expected
    assert len(subwords.boundaries.tokens_beginning_with(b" "))


def test_no_text_changes_the_bytes_or_characters_before_it() -> None:
    for tokenizer in (ByteTokenizer(), CharacterTokenizer("naïve ")):
        covers = tokenizer.boundaries.covers("naïve ")
        assert covers == [(tokenizer.encode("naïve "), b"")] and settled(covers) == len(tokenizer.encode("naïve "))
        assert tokenizer.boundaries.longest == 1 and settled(tokenizer.boundaries.covers("")) == 0
