"""Records are texts of their own, or lines of many texts, each of which goes on from its own state."""

import json
import random
from pathlib import Path

import pytest
from evaluation.test_score import eval_bits
from inference.conftest import prose

from lmlong.evaluation.records import Lines, RecordScore, States
from lmlong.evaluation.surprise import Surprise, Totals
from lmlong.inference.loading import TrainedLanguageModel, load


@pytest.fixture
def trained(run: Path) -> TrainedLanguageModel:
    return load(run, "cpu")


def scored(records: RecordScore, data: bytes, step: int = 1 << 16) -> list[Surprise]:
    lines = Lines()
    found = [line for place in range(0, len(data), step) for line in lines.read(data[place : place + step])]
    found += lines.finish()
    return [each for number, line in enumerate(found, 1) for each in records.read(line, "log", number)]


def test_lines_are_cut_however_they_come_and_long_ones_are_not_held() -> None:
    data = b"one\n\ntwo \xff\n" + b"x" * 100 + b"\nlast"
    for step in (1, 3, 1000):
        lines = Lines(longest=50)
        found = [line for place in range(0, len(data), step) for line in lines.read(data[place : place + step])]
        found += lines.finish()
        assert [line.data for line in found] == [b"one", b"", b"two \xff", None, b"last"]
        assert [line.size for line in found] == [4, 1, 6, 101, 4]
        assert [line.offset for line in found] == [0, 4, 5, 11, 112]


def test_a_record_is_a_document_of_its_own(trained: TrainedLanguageModel) -> None:
    texts = [prose(30, seed) for seed in range(5)]
    data = "".join(json.dumps({"message": text}) + "\n" for text in texts).encode()
    found = scored(RecordScore(trained, Totals(), 200, field="message"), data)
    assert [each.bits for each in found] == pytest.approx(
        [eval_bits(trained, text, end=True) for text in texts], rel=1e-6
    )
    assert [each.text for each in found] == [text[:200] for text in texts]
    assert sum(each.bytes for each in found) == len(data)
    plain = scored(RecordScore(trained, Totals(), 200), b"to be\nor not\n", step=1)
    assert [each.bits for each in plain] == pytest.approx(
        [eval_bits(trained, text, end=True) for text in ("to be", "or not")], rel=1e-6
    )


def test_interleaved_streams_are_each_as_if_alone(trained: TrainedLanguageModel, tmp_path: Path) -> None:
    draw = random.Random(0)
    alone = {
        name: [prose(draw.randint(1, 6), name * 100 + line).replace("\n", " ") for line in range(4)]
        for name in range(12)
    }
    order = [name for name in alone for _ in range(4)]
    draw.shuffle(order)
    left = {name: iter(texts) for name, texts in alone.items()}
    data = "".join(json.dumps({"host": name, "message": next(left[name])}) + "\n" for name in order).encode()
    states = States(trained, tmp_path, in_memory=3, most=100)
    found = scored(RecordScore(trained, Totals(), 200, "message", "host", states), data)
    assert states.forgotten == 0 and len(list(tmp_path.glob("*.state"))) == 12 - 3
    for name, texts in alone.items():
        mine = [each.bits for each, owner in zip(found, order, strict=True) if owner == name]
        assert sum(mine) == pytest.approx(eval_bits(trained, "".join(text + "\n" for text in texts)), rel=1e-5)


def test_streams_beyond_the_most_are_forgotten_and_counted(trained: TrainedLanguageModel, tmp_path: Path) -> None:
    data = "".join(json.dumps({"host": number}) + "\n" for number in range(20)).encode()
    states = States(trained, tmp_path, in_memory=2, most=5)
    found = scored(RecordScore(trained, Totals(), 200, stream="host", states=states), data)
    assert len(found) == 20 and states.forgotten == 15 and len(list(tmp_path.glob("*.state"))) == 3
    assert states.take("19") is not None and states.take("16") is not None and states.take("3") is None


def test_what_is_no_record_is_counted_with_the_reason(trained: TrainedLanguageModel) -> None:
    lines = [
        b'{"message": "fine"}',
        b"",
        b"no json",
        b"[1]",
        b'{"other": 1}',
        b'{"message": 7}',
        b"\xff",
        b"[" * 100_000,
    ]
    records = RecordScore(trained, Totals(), 200, field="message")
    found = scored(records, b"\n".join(lines))
    assert [(each.number, each.text) for each in found] == [(1, "fine")]
    assert records.skipped == {
        "empty": 1,
        "no JSON": 3,
        "no JSON object": 1,
        "no text in field 'message'": 2,
    }
