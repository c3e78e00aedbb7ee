"""Baselines without a model: what anyone can compute by hand."""

import math
import sys
from pathlib import Path

import pyppmd
import pytest
from models import write_run

from lmlong.cli.after_training import after_training
from lmlong.data import baselines
from lmlong.data.token_file import TokenFile, tokens_of
from lmlong.data.tokenizers.base import ByteTokenizer
from lmlong.model.metrics import LossTotals
from lmlong.training.run import TrainingResult

from .conftest import sentences

BYTES = ByteTokenizer()


def text(*documents: str) -> TokenFile:
    return tokens_of(documents, BYTES)


def printed(folder: Path, loss: LossTotals, found: baselines.Baselines) -> str:
    write_run(folder / "run", attention={"kind": "linear"})
    return after_training(TrainingResult(folder / "run", 1, loss, found))


def test_unigrams_are_counts_of_the_training_text_and_one_more_of_each_token() -> None:
    found = baselines.unigram_bits_per_byte([text("aab")], [1.0], text("ab"), BYTES)
    total = 4 + 257  # with eos; one for each token but bos, which no model predicts
    assert found == pytest.approx(-(math.log2(3 / total) + math.log2(2 / total) + math.log2(2 / total)) / 2)
    alike = ByteTokenizer()
    alike.eos = alike.bos  # one token for both ends, of which half are predicted
    trained, read = (tokens_of(documents, alike) for documents in (("aab", "a"), ("ab",)))
    found = baselines.unigram_bits_per_byte([trained], [1.0], read, alike)
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
    assert found.lzma.bits_per_byte < 1 < found.gzip
    assert found.lzma[2:] == (300, 600)


def test_without_pyppmd_lzma_is_the_strongest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyppmd", None)
    found = baselines.measure([text("a lot of text " * 9)], [1.0], text("of text"), BYTES)
    assert found.ppmd is None and found.primed == [found.lzma]
    assert list(found.bits_per_byte) == ["lzma", "unigram", "gzip"]
    line = printed(tmp_path, LossTotals(1.0, 1, 1), found).splitlines()[1]
    assert line.startswith(f"lzma         {found.lzma.bits_per_byte:.3f} by repeated phrases, after 126 bytes of")


def test_ppmd_is_the_strongest_and_reads_each_source_by_its_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = ["".join(part) for part in (sentences(9), sentences(12)[9:])]
    found = baselines.measure([text(texts[0])], [1.0], text(texts[1]), BYTES)
    assert found.ppmd and found.ppmd.bits_per_byte < found.lzma.bits_per_byte
    assert found.ppmd[2:] == tuple(len(each.encode()) for each in reversed(texts))
    assert found.primed == [found.ppmd, found.lzma]
    both, first = (len(pyppmd.compress(each, max_order=16, variant="H")) for each in ("".join(texts), texts[0]))
    assert found.ppmd.bits_per_byte * found.ppmd.bytes / 8 == pytest.approx(both - first, abs=8)
    monkeypatch.setattr(baselines, "PRIMING", {"PPMd": 1000})
    monkeypatch.setattr(baselines, "PIECE", 10)
    primed = baselines.ppmd_bits_per_byte([text(texts[0]), text(texts[1])], [1, 3], text("a"), BYTES)
    assert primed and 1000 <= primed.primed_bytes < 1020


@pytest.mark.parametrize(("model", "is_said"), [(9.0, True), (0.01, False)])
def test_a_baseline_that_beats_the_model_is_named(tmp_path: Path, model: float, is_said: bool) -> None:
    found = baselines.measure([text("a lot of text " * 9)], [1.0], text("a lot of text" * 9), BYTES)
    loss = LossTotals(model * 100 * math.log(2), 100, 100)
    assert ("needs fewer bits than the model" in printed(tmp_path, loss, found)) == is_said
