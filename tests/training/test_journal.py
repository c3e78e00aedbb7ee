"""metrics.jsonl: lines come as they happen and are cut back to where a run goes on."""

import json
import math
from pathlib import Path

from lmlong.training.journal import Journal


def test_lines_after_the_step_and_unfinished_ones_are_dropped(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "metrics.jsonl")
    for step in (10, 20, 20, 30):
        journal.write(step=step, loss=step / 10)
    with journal.path.open("a") as file:
        file.write('{"step": 4')
    journal.cut_back(20)
    lines = [json.loads(line) for line in journal.path.read_text().splitlines()]
    assert lines == [{"step": 10, "loss": 1.0}, {"step": 20, "loss": 2.0}, {"step": 20, "loss": 2.0}]


def test_numbers_json_has_no_word_for_become_null(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "metrics.jsonl")
    journal.write(step=1, loss=math.nan, gradient_norm=math.inf)
    assert json.loads(journal.path.read_text()) == {"step": 1, "loss": None, "gradient_norm": None}


def test_a_run_that_has_no_journal_yet_needs_no_cutting(tmp_path: Path) -> None:
    Journal(tmp_path / "metrics.jsonl").cut_back(5)
    assert not (tmp_path / "metrics.jsonl").exists()
