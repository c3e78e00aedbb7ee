"""Measured perplexity against a source whose entropy is known, and against the definition on a real model."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from evaluation.oracles import Oracle, Repeated, text_of
from evaluation.texts import TRAINING_TEXT, VALIDATION_TEXTS

from lmlong.data.token_file import TokenFile
from lmlong.data.tokenizers.base import ByteTokenizer
from lmlong.errors import UsageError
from lmlong.evaluation import scorer as scored
from lmlong.evaluation.document_sums import Sums
from lmlong.evaluation.perplexity import VIEWS, PerplexityOptions, fill, measure_perplexity, validation_text
from lmlong.evaluation.perplexity_report import table
from lmlong.evaluation.results import PerplexityReport
from lmlong.evaluation.scorer import Scorer
from lmlong.evaluation.spans import GOLDEN, block_size, choose_blocks, documents_of
from lmlong.inference.loading import TrainedLanguageModel
from lmlong.model.state_size import StateSize

SOURCE = Repeated(symbols=5, distance=11, wrong=0.1)
LENGTHS = [1, 2, 8, 16, 32]
DOCUMENTS = [64, 33, *range(200, 600, 9)]


def agrees(sums: Sums, truth: float) -> bool:
    """Return whether a measured loss is within two standard errors, which must be small."""
    assert sums.nats_error < 0.1
    return abs(sums.totals.nats_per_token - truth) < 2 * sums.nats_error + 1e-9


def test_the_curve_falls_where_the_entropy_does() -> None:
    text = text_of(SOURCE, DOCUMENTS)
    report = PerplexityReport("oracle", "", 0, StateSize((0, 0), (0, 0)), trained_length=16)
    scorer = Scorer(Oracle(SOURCE), text.tokens, documents_of(text), ByteTokenizer(), torch.device("cpu"))
    fill(report, scorer, LENGTHS, PerplexityOptions(("context", "position"), targets=4000, min_documents=2))
    assert [point.length for point in report.context] == LENGTHS
    for length, sums, _ in report.context:
        # a target has up to half as many tokens more before it
        assert agrees(sums, float(np.mean([SOURCE.entropy(length + more) for more in range(block_size(length))]))), (
            length
        )
    assert len({tuple(point.sums.tokens) for point in report.context}) == 1
    for first, last, sums in report.position:
        if SOURCE.entropy(first) == SOURCE.entropy(last) and sums.totals.tokens > 500:
            assert agrees(sums, SOURCE.entropy(first)), first


@torch.no_grad()
def by_definition(loaded: TrainedLanguageModel, text: np.ndarray, begin: int, first: int, end: int) -> float:
    """Return the nats of the tokens from `first` to `end`, each given those from `begin` on."""
    logits, _ = loaded.model(torch.from_numpy(text[None, begin : end - 1].astype(np.int64)))
    log_p = logits[0, first - begin - 1 :].double().log_softmax(-1)
    return -float(log_p[range(end - first), text[first:end].astype(np.int64)].sum())


def test_every_target_is_scored_by_its_definition(
    loaded: TrainedLanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scored, "TOKENS_AT_ONCE", 200)  # several batches, some of several rows
    monkeypatch.setattr(scored, "PIECE", 48)  # and spans of several pieces
    text = validation_text(loaded)
    options = PerplexityOptions(VIEWS, (8, 24, 40, 9999), targets=80, min_documents=2)
    report = measure_perplexity("tiny", loaded, text, options)
    assert report.left_out == [9999]
    assert report.carried is not None
    size = sum(len(each.encode()) for each in VALIDATION_TEXTS)
    assert (report.carried.totals.tokens, report.carried.totals.bytes) == (size + 2, size)  # the ends of both too
    assert [at.sums.totals.tokens for at in report.position][:8] == [2 << n for n in range(8)]
    documents = documents_of(text)
    for number, (begin, end) in enumerate(zip(documents.begins.tolist(), documents.ends.tolist(), strict=True)):
        assert report.carried.nats[number] == pytest.approx(
            by_definition(loaded, text.tokens, begin, begin + 1, end), rel=1e-5
        )
        room = (end - begin - 40) // 20
        blocks = [begin + 40 + int((place + number * GOLDEN) * room / 2) * 20 for place in range(2)]
        for length, sums, _ in report.context:
            step = block_size(length)
            nats = [
                by_definition(loaded, text.tokens, first - length, first, min(first + step, block + 20))
                for block in blocks
                for first in range(block, block + 20, step)
            ]
            assert sums.nats[number] == pytest.approx(sum(nats), rel=1e-5)
            assert sums.tokens[number] == 40 and sums.bytes[number] in (39, 40)  # the end has no byte
        for length, reset, sliding in report.windows:
            for step, sums in ((length, reset), (length // 2, sliding)):
                firsts = range(begin + 1, end, step)
                starts = [max(begin, first + step - 1 - length) for first in firsts]
                nats = [
                    by_definition(loaded, text.tokens, start, first, min(first + step, end))
                    for start, first in zip(starts, firsts, strict=True)
                ]
                assert sums.nats[number] == pytest.approx(sum(nats), rel=1e-5)


def test_windows_as_long_as_the_documents_are_one_pass_over_them(loaded: TrainedLanguageModel) -> None:
    text = validation_text(loaded)
    longest = int(documents_of(text).sizes.max())
    options = PerplexityOptions(("protocol", "position"), (16, longest), min_documents=0)
    report = measure_perplexity("tiny", loaded, text, options)
    assert report.carried is not None
    for sums in report.windows[-1][1:]:
        assert sums.nats == pytest.approx(report.carried.nats, rel=1e-5)
    assert report.windows[0].reset.nats != pytest.approx(report.carried.nats, rel=1e-3)
    assert sum(at.sums.nats for at in report.position) == pytest.approx(report.carried.nats, rel=1e-12)
    assert [(at.first, at.last) for at in report.position] == [(1 << n, (2 << n) - 1) for n in range(9)]


def test_the_default_text_is_the_one_held_out_of_training(loaded: TrainedLanguageModel) -> None:
    text = validation_text(loaded)
    framed = [[256, *text.encode(), 257] for text in VALIDATION_TEXTS]
    assert text.tokens.tolist() in (framed[0] + framed[1], framed[1] + framed[0])
    first = validation_text(loaded, limit=100)
    assert (first.tokens.tolist(), first.starts.tolist()) == (text.tokens[:100].tolist(), [0])


def test_other_files_are_read_whole(loaded: TrainedLanguageModel, tmp_path: Path) -> None:
    text = validation_text(loaded, [str(tmp_path / "train.txt")])
    assert text.tokens.tolist() == [256, *TRAINING_TEXT.encode(), 257]


def test_lengths_that_too_few_documents_reach_are_left_out(loaded: TrainedLanguageModel) -> None:
    text = validation_text(loaded)
    with pytest.raises(UsageError, match=r"takes 10 documents .* There are 2, the longest has 416 tokens"):
        measure_perplexity("tiny", loaded, text, PerplexityOptions(lengths=(64,)))
    report = measure_perplexity("tiny", loaded, text, PerplexityOptions(min_documents=1))
    assert [point.length for point in report.context] == [64, 256]
    assert report.left_out == [512, 1024, 2048, 4096, 8192, 16_384]
    assert report.documents == 2


def test_of_too_few_documents_parts_are_measured_at_shorter_lengths(loaded: TrainedLanguageModel) -> None:
    text = validation_text(loaded)
    report = measure_perplexity("tiny", loaded, text)  # 64 tokens before a block of 32 would take 960 in ten parts
    assert (report.documents, report.parts_of) == (10, 2)
    assert [point.length for point in report.context] == [32, 64][: len(report.context)]
    assert report.context[0].sums.documents == 10
    assert report.carried is not None and report.carried.totals.tokens == len(text.tokens) - 10
    assert "10 parts of 2 documents, each read from an empty state" in table([report])
    one = measure_perplexity("one", loaded, text.first(40))
    assert (one.documents, one.parts_of) == (10, 1) and one.context


def test_the_state_is_told_of(loaded: TrainedLanguageModel) -> None:
    report = measure_perplexity(
        "tiny", loaded, validation_text(loaded), PerplexityOptions(("state",), (64,), min_documents=1)
    )
    assert [at.position for at in report.health] == [1, 2, 4, 8, 16, 32, 64]
    assert all(at.norm > 0 and 1 <= at.features <= at.of == 8 and at.smallest > 0 for at in report.health)
    assert not report.context and not report.position


@pytest.mark.slow
def test_memory_at_a_million_tokens_is_that_at_64_thousand(run: Path, tmp_path: Path) -> None:
    (tmp_path / "long.txt").write_text("to the last syllable of recorded time\n" * 30_000)
    peaks = []
    for length in ("64k", "1024k"):
        code = f"""
import json
from lmlong.evaluation.perplexity import PerplexityOptions, measure_perplexity, validation_text
from lmlong.inference.loading import load
loaded = load({str(run)!r}, "cpu")
text = validation_text(loaded, [{str(tmp_path / "long.txt")!r}])
options = PerplexityOptions(("context",), ({int(length[:-1]) * 1024},), targets=256, min_documents=1)
print(measure_perplexity("tiny", loaded, text, options).peak_bytes)
"""
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        peaks.append(int(done.stdout))
    assert peaks[1] < 1.05 * peaks[0]


def test_blocks_are_spread_evenly() -> None:
    documents = documents_of(TokenFile(np.zeros(1000, np.uint16), np.arange(0, 1000, 100)))
    blocks = choose_blocks(documents, longest=40, size=10, targets=40, least=1)
    assert blocks.document.tolist() == [0, 2, 5, 7]
    # six places in each, of which the golden ratio takes the shares 0, 0.618, 0.236 and 0.854
    assert (blocks.first - documents.begins[blocks.document]).tolist() == [40, 70, 50, 90]
    blocks = choose_blocks(documents, longest=40, size=10, targets=300, least=1)
    assert np.bincount(blocks.document).tolist() == [3] * 10
    assert (blocks.first[:3] - documents.begins[0]).tolist() == [40, 60, 80]
    assert len(np.unique(choose_blocks(documents, 40, 10, targets=10, least=7).document)) == 7
    assert len(choose_blocks(documents, 40, 10, targets=10_000, least=1).first) == 60  # all there are


def test_documents_without_a_target_do_not_count() -> None:
    documents = documents_of(TokenFile(np.zeros(9, np.uint16), np.array([0, 1, 3, 8])))
    assert documents.sizes.tolist() == [2, 5]
