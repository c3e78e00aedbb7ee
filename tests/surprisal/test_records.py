"""Records are texts of their own, or lines of many texts, each of which goes on from its own state."""

import json
import random
from pathlib import Path

import pytest
from inference.conftest import prose, write_run
from surprisal.test_stream import eval_bits

import lmlong
from lmlong.data.tokenizers.base import ByteTokenizer
from lmlong.inference.loading import TrainedLanguageModel, load
from lmlong.model.state import state_bytes
from lmlong.surprisal.records import Lines, RecordScore, States
from lmlong.surprisal.token_bits import begin
from lmlong.surprisal.units import Surprise, Totals


@pytest.fixture
def trained(tmp_path: Path) -> TrainedLanguageModel:
    return load(write_run(tmp_path / "tiny", ByteTokenizer(), "bytes"), "cpu")


def scored(records: RecordScore, data: bytes, step: int = 1 << 16) -> list[Surprise]:
    lines = Lines()
    found = [line for place in range(0, len(data), step) for line in lines.read(data[place : place + step])]
    found += lines.finish()
    return [each for line in found for each in records.read(line, "log")]


def test_lines_are_cut_however_they_come_and_long_ones_are_not_held() -> None:
    data = b"one\n\ntwo \xff\n" + b"x" * 100 + b"\nlast"
    for step in (1, 3, 1000):
        lines = Lines(longest=50)
        found = [line for place in range(0, len(data), step) for line in lines.read(data[place : place + step])]
        found += lines.finish()
        assert [line.number for line in found] == [1, 2, 3, 4, 5]
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


def size_of(trained: TrainedLanguageModel) -> int:
    """Bytes of the state of one text."""
    return state_bytes(begin(trained))


def interleaved(texts: dict[str, list[str]]) -> tuple[list[str], bytes]:
    """The lines of many texts in any order, each with the name of its own; and those names."""
    order = [name for name, lines in texts.items() for _ in lines]
    random.Random(0).shuffle(order)
    left = {name: iter(lines) for name, lines in texts.items()}
    lines = [{"host": name, "message": next(left[name])} for name in order]
    return order, "".join(json.dumps(line) + "\n" for line in lines).encode()


@pytest.mark.parametrize(("count", "awake"), [(12, 3), pytest.param(1000, 100, marks=pytest.mark.slow)])
def test_interleaved_streams_are_each_as_if_alone(
    trained: TrainedLanguageModel, tmp_path: Path, count: int, awake: int
) -> None:
    lines = prose(40 * count).splitlines()
    texts = {f"host {number}": lines[number * 4 : number * 4 + 4] for number in range(count)}
    order, data = interleaved(texts)
    states = States(trained, tmp_path, memory=int(size_of(trained) * (awake + 0.9)), most=count)
    found = scored(RecordScore(trained, Totals(), 200, "message", "host", states), data)
    assert states.forgotten == 0
    assert awake - 1 <= count - len(list(tmp_path.glob("*.state"))) <= awake
    bits: dict[str, list[float]] = {}
    for name, each in zip(order, found, strict=True):
        bits.setdefault(name, []).append(each.bits)
    for name, texts_of_one in texts.items():
        alone = lmlong.score(trained, "".join(line + "\n" for line in texts_of_one))
        assert bits[name] == pytest.approx([each.bits for each in alone], rel=1e-5)


def test_streams_beyond_the_most_are_forgotten_and_counted(trained: TrainedLanguageModel, tmp_path: Path) -> None:
    data = "".join(json.dumps({"host": number}) + "\n" for number in range(20)).encode()
    states = States(trained, tmp_path, memory=int(size_of(trained) * 2.9), most=5)
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
        "not JSON": 3,
        "not a JSON object": 1,
        "no text in field 'message'": 2,
    }
