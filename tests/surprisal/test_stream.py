"""The bits of all units sum to those of `lmlong eval` on the same tokens, however the text comes."""

import dataclasses
import io
import json
import math
import os
import random
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from inference.conftest import prose
from models import write_run

import lmlong
from lmlong import recipe
from lmlong.data.tokenizers import train_tokenizer
from lmlong.errors import UsageError
from lmlong.evaluation.likelihoods import document_likelihoods
from lmlong.inference.loading import TrainedLanguageModel, load
from lmlong.model import device as device_module
from lmlong.surprisal.stream import KEPT, TextScore
from lmlong.surprisal.units import Surprise

TEXT = prose(700) + "naïve \0 \U0001f600\n\n\n" + prose(300, seed=1) + "the end"
UNITS = ("token", "byte", "line", "position")


@pytest.fixture(scope="module")
def subword_model(tmp_path_factory: pytest.TempPathFactory) -> TrainedLanguageModel:
    pieces = train_tokenizer([prose(3000)], recipe.Tokenizer(vocabulary=600))
    run = tmp_path_factory.mktemp("run")
    write_run(run, pieces, deviation=0.3, width=16, heads=2, attention={"kind": "linear"})
    return load(run, "cpu")


def eval_bits(trained: TrainedLanguageModel, text: str, end: bool = False) -> float:
    """The bits of a document as `lmlong eval` reads it."""
    (log_p,) = document_likelihoods(trained, [text], score_eos=end, show=False)
    return -log_p / math.log(2)


def pieces(data: bytes, seed: int, most: int) -> Iterator[bytes]:
    draw, place = random.Random(seed), 0
    while place < len(data):
        size = draw.randint(1, most)
        yield data[place : place + size]
        place += size


def test_learning_model_has_fewer_bits(subword_model: TrainedLanguageModel) -> None:
    learning_model = dataclasses.replace(subword_model, learn=True)
    bits = sum(each.bits for each in lmlong.score(learning_model, TEXT))
    assert bits == pytest.approx(eval_bits(learning_model, TEXT), rel=1e-5)
    assert bits < 0.99 * eval_bits(subword_model, TEXT)


SAVED = [*((unit, False, "32") for unit in UNITS), ("line", True, "32"), ("line", False, "bf16")]


@pytest.mark.parametrize(("unit", "learn", "precision"), SAVED)
def test_saved_score_continues_to_the_same_bits(
    subword_model: TrainedLanguageModel, tmp_path: Path, unit: Any, learn: bool, precision: Any
) -> None:
    model, data, file = dataclasses.replace(subword_model, learn=learn), TEXT.encode(), tmp_path / "a.state"
    places = (3, data.index("ï".encode()) + 1, len(data) - 2)
    for place in places if unit == "line" else places[1:2]:
        first, whole = (TextScore(model, unit, precision=precision) for _ in range(2))
        for score in (first, whole):
            list(score.read(data[:place]))
        model.save_state(first.session, file)
        saved = json.loads(json.dumps(first.to_json()))
        totals = type(first.totals).from_json(saved["totals"])
        again = TextScore(model, unit, totals=totals, session=model.load_state(file), precision=precision)
        again.restore(saved)
        rest = [[*score.read(data[place:]), *score.finish()] for score in (again, whole)]
        assert rest[0] == rest[1] != []


def assert_in_order(found: list[Surprise], text: str) -> None:
    """Check that the numbers and places of units are those of all of a text."""
    assert [each.number for each in found] == [*range(1, len(found) + 1)]
    assert [each.offset for each in found] == [0, *accumulate(each.bytes for each in found)][:-1]
    assert sum(each.bytes for each in found) == len(text.encode())


@pytest.mark.parametrize("unit", UNITS)
def test_units_after_a_state_are_of_the_new_text(subword_model: TrainedLanguageModel, unit: str) -> None:
    """The end of the text before may be unread, since its tokens depend on what follows."""
    unread = 0
    for cut in range(1000, 1030, 6):
        before, text = TEXT[:cut], TEXT[cut : cut + 300]
        session = subword_model.read(before)
        unread += len(session.unread.pending)
        found = list(lmlong.score(subword_model, text, by=unit, state=session))  # type: ignore[arg-type]
        assert_in_order(found, text)
        assert all(each.bytes for each in found) and all(each.tokens for each in found if unit == "token")
        if unit == "line":
            assert [each.text for each in found] == [line[:KEPT] for line in text.splitlines(keepends=True)]
    assert unread > 0


@pytest.mark.parametrize("unit", UNITS)
def test_units_sum_to_the_bits_of_eval(subword_model: TrainedLanguageModel, unit: str) -> None:
    found = list(lmlong.score(subword_model, TEXT, by=unit))  # type: ignore[arg-type]
    bits = sum(each.bits for each in found)
    assert bits == pytest.approx(eval_bits(subword_model, TEXT), rel=1e-6)
    assert sum(each.tokens for each in found) == len(subword_model.tokenizer.encode(TEXT))
    assert_in_order(found, TEXT)
    assert found[-1].mean == pytest.approx(bits / len(TEXT.encode()))
    if unit == "line":
        *lines, last = TEXT.split("\n")
        lines = [*(line + "\n" for line in lines), last]
        assert [each.bytes for each in found] == [len(line.encode()) for line in lines]
        assert [each.text for each in found] == [line.encode()[:KEPT].decode("utf-8", "replace") for line in lines]
    if unit == "position":
        assert [each.tokens for each in found[:-1]] == [1, *(2**n for n in range(len(found) - 2))]


@pytest.mark.parametrize(("seed", "most"), [(0, 1), (1, 7), (2, 300)])
def test_pieces_give_the_same_units(subword_model: TrainedLanguageModel, seed: int, most: int) -> None:
    middle = TEXT.index("ï")
    text = TEXT[middle - 150 : middle + 150] if most < 10 else TEXT  # small pieces are slow
    whole = list(lmlong.score(subword_model, text))
    scores = TextScore(subword_model)
    found = [unit for piece in pieces(text.encode(), seed, most) for unit in scores.read(piece)]
    assert_alike([*found, *scores.finish()], whole)


def test_text_binary_file_and_pipe_are_scored(subword_model: TrainedLanguageModel, tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(TEXT.encode())
    whole = list(lmlong.score(subword_model, TEXT))
    with path.open(encoding="utf-8", newline="") as text, path.open("rb") as data:
        assert list(lmlong.score(subword_model, text)) == list(lmlong.score(subword_model, data)) == whole
    assert list(lmlong.score(subword_model, io.BytesIO(TEXT.encode()))) == whole
    reader, writer = os.pipe()
    with open(reader, "rb") as coming, open(writer, "wb") as going:
        going.write(b"to be\nor not\nto")
        going.flush()
        assert next(lmlong.score(subword_model, coming)).text == "to be\n"  # though more may come


def test_invalid_bytes_are_counted(subword_model: TrainedLanguageModel) -> None:
    data = b"to be\xff\xfe or\nnot \xe2\x82\nto be\xf0\x9f"
    for step in (1, 2, 100):
        scores = TextScore(subword_model)
        found = [unit for place in range(0, len(data), step) for unit in scores.read(data[place : place + step])]
        found += scores.finish()
        assert [each.bytes for each in found] == [len(line) for line in data.splitlines(keepends=True)]
        assert scores.not_read == 6
        assert found[0].text == "to be\ufffd\ufffd or\n"


def test_endless_line_takes_no_memory(subword_model: TrainedLanguageModel) -> None:
    scores = TextScore(subword_model)
    sizes = []
    for _ in range(4):
        assert not list(scores.read(b"\xff\xfeA" * 1_000))
        sizes.append(len(json.dumps(scores.to_json())))
    assert max(sizes[1:]) < sizes[0] + 100
    (found,) = scores.finish()
    assert found.bytes == 12_000 and scores.not_read == 8_000


def test_text_continues_after_settle(subword_model: TrainedLanguageModel) -> None:
    scores = TextScore(subword_model)
    found = [*scores.read(b"to be or not\n")]
    found += scores.settle()
    assert [each.text for each in found] == ["to be or not\n"], "though the next line might change its last token"
    found += [*scores.read(b"to be"), *scores.finish()]
    assert [each.bytes for each in found] == [13, 5]


def test_unknown_unit_is_refused(subword_model: TrainedLanguageModel) -> None:
    with pytest.raises(UsageError, match="by: 'word'"):
        list(lmlong.score(subword_model, "to be", by="word"))  # type: ignore[arg-type]


def assert_alike(found: list[Surprise], expected: list[Surprise]) -> None:
    for name in ("source", "number", "offset", "bytes", "tokens", "text"):
        assert [getattr(each, name) for each in found] == [getattr(each, name) for each in expected]
    for name in ("bits", "mean"):
        values = [getattr(each, name) for each in expected]
        assert [getattr(each, name) for each in found] == pytest.approx(values, rel=1e-4, abs=1e-4)


def test_precision_is_that_of_training(
    subword_model: TrainedLanguageModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(device_module, "computes_in_bf16", lambda device: True)
    training = subword_model.recipe.training.model_copy(update={"precision": "bf16"})
    recipe = subword_model.recipe.model_copy(update={"training": training})
    trained = dataclasses.replace(subword_model, recipe=recipe)
    own, rounded, exact = (
        sum(each.bits for each in lmlong.score(trained, TEXT, precision=chosen)) for chosen in (None, "bf16", "32")
    )
    assert own == rounded != exact == sum(each.bits for each in lmlong.score(subword_model, TEXT))
    assert own == pytest.approx(exact, rel=0.02)
