"""Baselines without a model: what anyone can compute by hand."""

import math
from pathlib import Path

import pytest
from machine import needs_native

from lmlong.cli.after_training import after_training
from lmlong.data import baselines, context_mixing
from lmlong.data.token_file import TokenFile, tokens_of
from lmlong.data.tokenizers.base import ByteTokenizer
from lmlong.model.metrics import LossTotals
from lmlong.training.run import TrainingResult

from .conftest import sentences

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


def test_without_a_compiler_lzma_is_the_strongest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context_mixing, "library", lambda: None)
    found = baselines.measure([text("a lot of text " * 9)], [1.0], text("of text"), BYTES)
    assert found.mixing is None and found.strongest == (found.lzma, found.lzma_bytes, found.primed_bytes)
    assert list(found.bits_per_byte) == ["lzma", "unigram", "gzip"]
    result = TrainingResult(Path("run"), 1, LossTotals(1, 1, 1.0), found)
    line = after_training(result).splitlines()[1]
    assert line.startswith(f"lzma         {found.lzma:.3f} by repeated phrases, after 126 bytes of training text")


@needs_native
def test_context_mixing_is_the_strongest_and_reads_each_source_by_its_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = ["".join(part) for part in (sentences(9), sentences(12)[9:])]
    found = baselines.measure([text(texts[0])], [1.0], text(texts[1]), BYTES)
    assert found.mixing and found.mixing.bits_per_byte < found.lzma
    assert found.mixing[1:] == tuple(len(each.encode()) for each in reversed(texts))
    assert found.strongest == found.mixing and next(iter(found.bits_per_byte)) == "mixing"
    monkeypatch.setattr(baselines, "PRIMING", {"mixing": 1000, "lzma": 1000})
    monkeypatch.setattr(baselines, "PIECE", 10)
    mixed = baselines.mixing_bits_per_byte([text(texts[0]), text(texts[1])], [1, 3], text("a"), BYTES)
    assert mixed and 1000 <= mixed.primed_bytes < 1020
