"""Measured perplexity against its definition."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from evaluation.conftest import TRAINING_TEXT, VALIDATION_TEXTS
from models import predict

from lmlong.data.token_file import TokenFile
from lmlong.errors import UsageError
from lmlong.evaluation import scorer as scored
from lmlong.evaluation.perplexity import evaluate, validation_text
from lmlong.evaluation.perplexity_report import perplexity_report
from lmlong.evaluation.spans import GOLDEN, choose_blocks, documents_of
from lmlong.inference.loading import TrainedLanguageModel
from lmlong.model import language_model
from lmlong.model.state import state_bytes


@torch.no_grad()
def nats(loaded: TrainedLanguageModel, text: np.ndarray, begin: int, first: int, end: int) -> np.ndarray:
    """Return the loss of each token from `first` to `end`, given those from `begin` on."""
    logits, _ = predict(loaded.model, torch.from_numpy(text[None, begin : end - 1].astype(np.int64)))
    log_p = logits[0, first - begin - 1 :].double().log_softmax(-1).numpy()
    return -np.take_along_axis(log_p, text[first:end, None].astype(np.int64), axis=1)[:, 0]


@pytest.fixture
def in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several batches, some of several rows, and spans of several pieces."""
    monkeypatch.setattr(scored, "TOKENS_AT_ONCE", 200)
    monkeypatch.setattr(language_model, "PIECE", 48)


@pytest.mark.usefixtures("in_pieces")
def test_whole_documents_are_scored_by_the_definition(loaded: TrainedLanguageModel) -> None:
    text = validation_text(loaded)
    report = evaluate(loaded, views=("position",), lengths=(24, 100, 9999), min_documents=2)
    assert report.left_out == [9999]
    assert report.carried is not None
    size = sum(len(each.encode()) for each in VALIDATION_TEXTS)
    assert (report.carried.totals.tokens, report.carried.totals.bytes) == (size + 2, size)  # the ends of both too
    documents = documents_of(text)
    for number, (begin, end) in enumerate(zip(documents.begins.tolist(), documents.ends.tolist(), strict=True)):
        whole = nats(loaded, text.tokens, begin, begin + 1, end)
        assert report.carried.nats[number] == pytest.approx(whole.sum(), rel=1e-5)
        for exponent, (first, last, sums) in enumerate(report.position):
            assert (first, last) == (2**exponent, 2 ** (exponent + 1) - 1)
            assert sums.nats[number] == pytest.approx(whole[first - 1 : last].sum(), rel=1e-5)


@pytest.mark.usefixtures("in_pieces")
def test_the_same_targets_are_scored_by_the_definition_at_each_length(loaded: TrainedLanguageModel) -> None:
    text = validation_text(loaded)
    report = evaluate(loaded, views=("context",), lengths=(8, 24, 40), targets=80, min_documents=2)
    documents = documents_of(text)
    blocks = []  # the first tokens of two blocks of 20 targets in each document
    for number, (begin, end) in enumerate(zip(documents.begins.tolist(), documents.ends.tolist(), strict=True)):
        room = (end - begin - 40) // 20
        blocks += [begin + 40 + int((place + number * GOLDEN) * room / 2) * 20 for place in range(2)]
    position = np.concatenate([np.arange(first, first + 20) for first in blocks])
    for (length, sums, _), step in zip(report.context, (4, 12, 20), strict=True):
        lost = [
            nats(loaded, text.tokens, first - length, first, min(first + step, block + 20)).sum()
            for block in blocks
            for first in range(block, block + 20, step)
        ]
        assert sums.nats == pytest.approx(np.sum(np.reshape(lost, (2, -1)), axis=1), rel=1e-5)
        assert sums.tokens.tolist() == [40, 40]
        assert sums.bytes.sum() == loaded.tokenizer.token_bytes[text.tokens[position]].sum()


def test_the_default_text_is_the_one_held_out_of_training(loaded: TrainedLanguageModel, tmp_path: Path) -> None:
    text = validation_text(loaded)
    framed = [[256, *text.encode(), 257] for text in VALIDATION_TEXTS]
    assert text.tokens.tolist() in (framed[0] + framed[1], framed[1] + framed[0])
    first = validation_text(loaded, limit=100)
    assert (first.tokens.tolist(), first.starts.tolist()) == (text.tokens[:100].tolist(), [0])
    other = validation_text(loaded, [str(tmp_path / "train.txt")])
    assert other.tokens.tolist() == [256, *TRAINING_TEXT.encode(), 257]


def test_lengths_that_too_few_documents_reach_are_left_out(loaded: TrainedLanguageModel) -> None:
    with pytest.raises(UsageError, match=r"takes 10 documents .* The text has 2, the longest of 416 tokens"):
        evaluate(loaded, lengths=(64,))
    report = evaluate(loaded, min_documents=1)
    assert [point.length for point in report.context] == [64, 256]
    assert report.left_out == [512, 1024, 2048, 4096, 8192, 16_384]


def test_too_few_documents_are_cut_into_parts_and_measured_at_shorter_lengths(loaded: TrainedLanguageModel) -> None:
    text = validation_text(loaded)
    report = evaluate(loaded)  # 64 tokens before a block of 32 would take 960 in ten parts
    assert (report.documents, report.parts_of) == (10, 2)
    assert [point.length for point in report.context] == [16, 32]  # two, to show a gain
    assert report.context[0].sums.documents == 10
    assert report.carried is not None and report.carried.totals.tokens == len(text.tokens) - 10
    assert "10 parts of 2 documents, each read from an empty state" in perplexity_report([report]).text()
    one = evaluate(loaded, tokens=40)
    assert (one.documents, one.parts_of) == (10, 1) and one.context


@pytest.mark.slow
def test_memory_at_a_million_tokens_is_that_at_64_thousand(run: Path, tmp_path: Path) -> None:
    (tmp_path / "long.txt").write_text("to the last syllable of recorded time\n" * 30_000)
    options = ("--by", "context", "--targets", "256", "--min-documents", "1", "--device", "cpu", "--json", "-")
    peaks = []
    for length in ("64k", "1024k"):
        words = [sys.executable, "-m", "lmlong", "eval", run, "--data", tmp_path / "long.txt", "--lengths", length]
        done = subprocess.run([*words, *options], capture_output=True, text=True, check=True)
        peaks.append(json.loads(done.stdout)["runs"][0]["peak_bytes"])
    assert peaks[1] < 1.05 * peaks[0]


def test_blocks_are_spread_evenly() -> None:
    starts = np.append(np.arange(0, 1000, 100), 1000)  # the last has no target
    documents = documents_of(TokenFile(np.zeros(1001, np.uint16), starts))
    assert documents.sizes.tolist() == [100] * 10
    blocks = choose_blocks(documents, longest=40, size=10, targets=40, least=1)
    assert blocks.document.tolist() == [0, 2, 5, 7]
    # six places in each, of which the golden ratio takes the shares 0, 0.618, 0.236 and 0.854
    assert (blocks.first - documents.begins[blocks.document]).tolist() == [40, 70, 50, 90]
    blocks = choose_blocks(documents, longest=40, size=10, targets=300, least=1)
    assert np.bincount(blocks.document).tolist() == [3] * 10
    assert (blocks.first[:3] - documents.begins[0]).tolist() == [40, 60, 80]
    assert len(np.unique(choose_blocks(documents, 40, 10, targets=10, least=7).document)) == 7
    assert len(choose_blocks(documents, 40, 10, targets=10_000, least=1).first) == 60  # all there are


def test_rows_are_read_together_only_as_far_as_their_states_have_room(
    loaded: TrainedLanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, score = set(), scored.score

    def counted(model: Any, tokens: torch.Tensor, *rest: Any) -> Any:
        rows.add(len(tokens))
        return score(model, tokens, *rest)

    monkeypatch.setattr(scored, "STATES_AT_ONCE", 2 * state_bytes(loaded.model.init_state(1)))
    monkeypatch.setattr(scored, "score", counted)
    evaluate(loaded, views=("context",), lengths=(8, 16), targets=40, min_documents=2)
    assert max(rows) == 2
