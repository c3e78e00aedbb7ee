"""Scores at several lengths, against closed forms and against the whole text read at once."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from evaluation.texts import TRAINING_TEXT, VALIDATION_TEXTS

from lmlong.errors import UsageError
from lmlong.evaluation import perplexity
from lmlong.evaluation.perplexity import Curve, measure, validation_text
from lmlong.inference.loading import Loaded
from lmlong.inference.state_size import StateSize
from lmlong.text.tokenizer import ByteTokenizer

BYTES = sum(len(text.encode()) for text in VALIDATION_TEXTS)
TARGETS = BYTES + len(VALIDATION_TEXTS)  # and the end of each document
LENGTHS = [1, 7, 64, 256, TARGETS + 1]
VOCABULARY = 258


def test_the_default_text_is_the_one_held_out_of_training(loaded: Loaded) -> None:
    text = validation_text(loaded)
    framed = [[256, *text.encode(), 257] for text in VALIDATION_TEXTS]
    assert text.tolist() in (framed[0] + framed[1], framed[1] + framed[0])
    assert validation_text(loaded, limit=100).tolist() == text[:100].tolist()


def test_other_files_are_read_whole(loaded: Loaded, tmp_path: Path) -> None:
    text = validation_text(loaded, [str(tmp_path / "train.txt")])
    assert text.tolist() == [256, *TRAINING_TEXT.encode(), 257]


def test_a_model_that_knows_nothing_loses_log_of_the_vocabulary(loaded: Loaded) -> None:
    torch.nn.init.zeros_(loaded.model.embedding.weight)
    curve = measure("nothing", loaded, validation_text(loaded), LENGTHS)
    assert [point.length for point in curve.points] == LENGTHS
    for point in curve.points:
        assert (point.totals.tokens, point.totals.bytes) == (TARGETS, BYTES)
        assert point.totals.nats == pytest.approx(TARGETS * math.log(VOCABULARY), rel=1e-6)
        assert point.totals.perplexity == pytest.approx(VOCABULARY, rel=1e-5)
        assert point.totals.bits_per_byte == pytest.approx(math.log2(VOCABULARY) * TARGETS / BYTES, rel=1e-6)


@torch.no_grad()
def nats_of_windows(loaded: Loaded, text: np.ndarray, length: int) -> float:
    """The definition: each token but the first, given those before it in its window; none after a document ends."""
    lost = 0.0
    for begin in range(0, len(text) - 1, length):
        window = torch.from_numpy(text[begin : begin + length + 1].astype(np.int64))
        inputs, targets = window[None, :-1], window[1:]
        logits, _ = loaded.model.prefill(inputs, starts=inputs == ByteTokenizer().bos)
        chances = logits[0].double().log_softmax(-1)[torch.arange(len(targets)), targets]
        lost -= float(chances[inputs[0] != ByteTokenizer().eos].sum())
    return lost


def test_each_length_is_scored_by_its_definition(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(perplexity, "TOKENS_AT_ONCE", 200)  # several batches, some of several rows
    text = validation_text(loaded)
    curve = measure("tiny", loaded, text, LENGTHS)
    expected = [nats_of_windows(loaded, text, length) for length in LENGTHS]
    assert [point.totals.nats for point in curve.points] == pytest.approx(expected, rel=1e-5)
    assert len({round(nats, 2) for nats in expected}) == len(LENGTHS)


def test_lengths_that_the_text_does_not_reach_are_left_out(loaded: Loaded) -> None:
    text = validation_text(loaded, limit=101)
    curve = measure("tiny", loaded, text, [50, 100, 101, 4096])
    assert [(point.length, point.totals.tokens) for point in curve.points] == [(50, 100), (100, 100)]
    assert curve.left_out == [101, 4096]
    with pytest.raises(UsageError, match="the text has 101 tokens"):
        measure("tiny", loaded, text, [101])


def test_the_usual_lengths_and_the_trained_one_are_measured(loaded: Loaded) -> None:
    curve = measure("tiny", loaded, validation_text(loaded))
    assert [point.length for point in curve.points] == [64, 256]
    assert curve.left_out == [1024, 4096, 16_384]
    assert curve == Curve(
        name="tiny",
        checkpoint=str(loaded.checkpoint),
        parameters=sum(weight.numel() for weight in loaded.model.parameters()),
        state=StateSize((577, 2312), (0, 0)),
        trained_length=64,
        points=curve.points,
        left_out=curve.left_out,
    )
