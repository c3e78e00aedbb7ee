"""metrics.jsonl: lines come as they happen and are cut back to where a run goes on."""

import json
import math
from pathlib import Path

from lmlong.training.metrics_log import MetricsLog


def test_lines_after_the_step_and_unfinished_ones_are_dropped(tmp_path: Path) -> None:
    metrics_log = MetricsLog(tmp_path / "metrics.jsonl")
    for step in (10, 20, 20, 30):
        metrics_log.write(step=step, loss=step / 10)
    with metrics_log.path.open("a") as file:
        file.write('{"step": 4')
    metrics_log.cut_back(20)
    lines = [json.loads(line) for line in metrics_log.path.read_text().splitlines()]
    assert lines == [{"step": 10, "loss": 1.0}, {"step": 20, "loss": 2.0}, {"step": 20, "loss": 2.0}]


def test_numbers_json_has_no_word_for_become_null(tmp_path: Path) -> None:
    metrics_log = MetricsLog(tmp_path / "metrics.jsonl")
    metrics_log.write(step=1, loss=math.nan, gradient_norm=math.inf)
    assert json.loads(metrics_log.path.read_text()) == {"step": 1, "loss": None, "gradient_norm": None}


def test_a_run_that_has_no_journal_yet_needs_no_cutting(tmp_path: Path) -> None:
    MetricsLog(tmp_path / "metrics.jsonl").cut_back(5)
    assert not (tmp_path / "metrics.jsonl").exists()
