"""Baselines without a model: what anyone can compute by hand."""

import math

import pytest

from lmlong.data import baselines
from lmlong.data.token_file import TokenFile, tokens_of
from lmlong.data.tokenizer import ByteTokenizer

BYTES = ByteTokenizer()


def text(*documents: str) -> TokenFile:
    return tokens_of(documents, BYTES)


def test_unigrams_are_counts_of_the_training_text_and_one_more_of_each_token() -> None:
    found = baselines.unigram_bits_per_byte([text("aab")], [1.0], text("ab"), BYTES)
    total = 4 + 257  # with eos; one for each token but bos, which no model predicts
    assert found == pytest.approx(-(math.log2(3 / total) + math.log2(2 / total) + math.log2(2 / total)) / 2)


def test_of_one_token_for_both_ends_of_a_document_half_are_predicted() -> None:
    tokenizer = ByteTokenizer()
    tokenizer.eos = tokenizer.bos
    trained, read = (tokens_of(documents, tokenizer) for documents in (("aab", "a"), ("ab",)))
    found = baselines.unigram_bits_per_byte([trained], [1.0], read, tokenizer)
    total = 6 + 258
    assert found == pytest.approx(-(math.log2(4 / total) + math.log2(2 / total) + math.log2(3 / total)) / 2)


def test_sources_count_by_their_weight() -> None:
    sources = [text("a" * 10_000), text("b" * 10)]
    even = baselines.unigram_bits_per_byte(sources, [1, 1], text("b"), BYTES)
    mostly_a = baselines.unigram_bits_per_byte(sources, [1000, 1], text("b"), BYTES)
    assert even < mostly_a - 3


def test_lzma_knows_the_training_text_and_gzip_does_not() -> None:
    phrase = "".join(chr(33 + (number * number) % 90) for number in range(300))
    found = baselines.measure([text(phrase * 2)], [1.0], text(phrase), BYTES)
    assert found.lzma < 1 < found.gzip
    assert (found.lzma_bytes, found.primed_bytes) == (300, 600)
