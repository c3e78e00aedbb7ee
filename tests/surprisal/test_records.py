"""Records are lines, and documents of their own."""

import json

import pytest
from inference.conftest import prose
from models import write_run
from surprisal.test_stream import eval_bits

from lmlong.inference.loading import TrainedLanguageModel, load
from lmlong.surprisal.records import Lines, RecordScore
from lmlong.surprisal.units import Surprise


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> TrainedLanguageModel:
    run = tmp_path_factory.mktemp("run")
    write_run(run, deviation=1.0, width=16, heads=2, attention={"kind": "linear"})
    return load(run, "cpu")


def scored(records: RecordScore, data: bytes, step: int = 1 << 16) -> list[Surprise]:
    pieces = (data[place : place + step] for place in range(0, len(data), step))
    return [each for piece in pieces for each in records.read(piece)] + list(records.finish())


def test_lines_are_split_and_long_ones_dropped() -> None:
    data = b"one\n\ntwo \xff\n" + b"x" * 100 + b"\nlast"
    for step in (1, 3, 1000):
        lines = Lines(longest=50)
        found = [line for place in range(0, len(data), step) for line in lines.read(data[place : place + step])]
        found += lines.finish()
        assert [line.number for line in found] == [1, 2, 3, 4, 5]
        assert [line.data for line in found] == [b"one", b"", b"two \xff", None, b"last"]
        assert [line.size for line in found] == [4, 1, 6, 101, 4]
        assert [line.offset for line in found] == [0, 4, 5, 11, 112]


def test_record_is_a_document(trained: TrainedLanguageModel) -> None:
    texts = [prose(30, seed) for seed in range(5)]
    data = "".join(json.dumps({"message": text}) + "\n" for text in texts).encode()
    found = scored(RecordScore(trained, field="message"), data)
    assert [each.text for each in found] == [text[:200] for text in texts]
    assert sum(each.bytes for each in found) == len(data)
    found += scored(RecordScore(trained), b"to be\nor not\n", step=1)
    expected = [eval_bits(trained, text, end=True) for text in (*texts, "to be", "or not")]
    assert [each.bits for each in found] == pytest.approx(expected, rel=1e-6)


def test_invalid_records_are_counted(trained: TrainedLanguageModel) -> None:
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
    records = RecordScore(trained, field="message")
    found = scored(records, b"\n".join(lines))
    assert [(each.number, each.text) for each in found] == [(1, "fine")]
    reasons = {"empty": 1, "not JSON": 3, "not a JSON object": 1, "no text in field 'message'": 2}
    assert records.notes == [f"skipped {count} records: {reason}" for reason, count in reasons.items()]
