"""metrics.jsonl: lines come as they happen and are cut back to where a run resumes."""

import json
import math
from pathlib import Path

import pytest

from lmlong.training.metrics_log import MetricsLog, last_validation, read_entries

GARBAGE = (b"garbage\n", b"\xff\xfe\x00\n", b"[]\n", b'{"step": "3"}\n', b"\n", b'{"loss": 1}\n', b"[" * 10_000 + b"\n")


def test_later_and_invalid_lines_are_dropped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    metrics_log = MetricsLog(tmp_path / "metrics.jsonl")
    for step in (10, 20, 20, 30):
        metrics_log.write(step=step, loss=step / 10)
    lines = metrics_log.path.read_bytes().splitlines(keepends=True)
    metrics_log.path.write_bytes(b"".join([lines[0], *GARBAGE, *lines[1:], b'{"step": 4']))
    metrics_log.cut_back(20)
    assert metrics_log.path.read_bytes() == b"".join(lines[:3])
    assert f"{len(GARBAGE)} invalid lines were dropped" in capsys.readouterr().err


def test_nonfinite_numbers_become_null(tmp_path: Path) -> None:
    metrics_log = MetricsLog(tmp_path / "metrics.jsonl")
    metrics_log.cut_back(5)
    assert not metrics_log.path.exists(), "a missing log is not created"
    metrics_log.write(step=1, loss=math.nan, gradient_norm=math.inf, validation={"nats": math.inf})
    written = json.loads(metrics_log.path.read_text())
    assert written == {"step": 1, "loss": None, "gradient_norm": None, "validation": {"nats": None}}


LARGE = "1" + "0" * 400


@pytest.mark.parametrize(
    "line",
    [
        '{"step": 1e3}',
        '{"step": true}',
        '{"step": -1}',
        '{"step": ' + LARGE + "}",
        '{"step": 2, "loss": "low"}',
        '{"step": 2, "loss": ' + LARGE + "}",
        '{"step": 2, "loss": NaN}',
        '{"step": 2, "loss": 1e999}',
        '{"step": 2, "bits_per_byte": [1]}',
        '{"step": 2, "validation": 3}',
        '{"step": 2, "validation": {}}',
        '{"step": 2, "validation": {"bits_per_byte": null}}',
        '{"step": 2, "validation": {"bits_per_byte": {}}}',
        '{"step": 2, "final_validation": {"nats": ' + LARGE + "}}",
        "[" * 100_000,
        "9" * 5000,
    ],
)
def test_invalid_line_is_skipped_when_read(tmp_path: Path, line: str) -> None:
    path = tmp_path / "metrics.jsonl"
    step = {"step": 1, "loss": None, "bits_per_byte": 3, "event": "a spike"}
    validation = {"step": 1, "validation": {"bits_per_byte": 2.5}}
    path.write_text(f"{json.dumps(step)}\n{line}\n{json.dumps(validation)}\n")
    assert read_entries(path) == [step, validation]
    assert last_validation(read_entries(path)) == {"step": 1, "bits_per_byte": 2.5}
