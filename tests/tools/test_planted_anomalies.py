"""Anomalies planted in a made-up log: their lines are told rightly, and what finds them is counted rightly."""

import json
import re
import runpy
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from interop.exported import write_run
from planted_parts.anomalies import by_length, by_rarity, template
from planted_parts.anomaly_ranking import alarms_above, curve_of
from planted_parts.service_log import ANOMALIES, Planted, ServiceLog, write_log

TOOL = Path(__file__).parents[2] / "tools" / "planted_anomalies.py"
FORM = r"2026-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z (INFO |WARN |ERROR) [a-z]+ +\S.*"


def test_a_log_follows_from_its_seed() -> None:
    assert write_log(900, 3, 2) == write_log(900, 3, 2)
    assert write_log(900, 3).lines[:200] != write_log(900, 4).lines[:200]
    assert len(write_log(900, 3).lines) >= 900 and write_log(900, 3).planted == []


def test_a_normal_log_has_lines_in_order_of_time_that_are_rare_or_long_too() -> None:
    lines = write_log(3000, 0).lines
    assert all(re.fullmatch(FORM, line) for line in lines)
    stamps = [line[:24] for line in lines]
    assert stamps == sorted(stamps)
    assert sum("nightly dump begins" in line for line in lines) in (1, 2, 3)
    assert max(map(len, lines)) > 250


@pytest.fixture(scope="module")
def log() -> ServiceLog:
    return write_log(3000, 11, each=4, quiet=100)


def test_there_are_as_many_of_each_kind_at_places_of_their_own(log: ServiceLog) -> None:
    kinds = [one.kind for one in log.planted]
    assert {kind: kinds.count(kind) for kind in ANOMALIES} == dict.fromkeys(ANOMALIES, 4)
    ends = [(0, 100), *((one.first, one.last) for one in log.planted)]
    assert all(before[1] < after[0] <= after[1] for before, after in pairwise(ends))


def lines_of(log: ServiceLog, kind: str) -> list[list[str]]:
    return [log.lines[one.first - 1 : one.last] for one in log.planted if one.kind == kind]


@pytest.mark.parametrize(
    ("kind", "holds"),
    [
        ("new message", lambda line, normal: template(line[25:]) not in normal),
        ("wrong value", lambda line, normal: template(line[25:]) in normal),
        ("wrong order", lambda line, normal: template(line[25:]) in normal),
        ("other format", lambda line, normal: not line.startswith("2026-")),
        ("cut short", lambda line, normal: line.startswith("2026-") and template(line[25:]) not in normal),
    ],
)
def test_the_lines_that_are_told_are_the_anomalies(
    log: ServiceLog, kind: str, holds: Callable[[str, set[str]], bool]
) -> None:
    normal = {template(line[25:]) for seed in (1, 2, 3) for line in write_log(4000, seed).lines}
    for lines in lines_of(log, kind):
        assert len(lines) == 1 and holds(lines[0], normal), lines


def test_a_burst_is_one_line_again_and_again_after_its_first(log: ServiceLog) -> None:
    for one in (one for one in log.planted if one.kind == "burst"):
        messages = {line[25:] for line in log.lines[one.first - 2 : one.last]}
        assert len(messages) == 1 and 8 <= one.last - one.first + 1 < 16


def test_each_request_of_a_normal_log_begins_and_ends_at_the_gateway() -> None:
    of_requests: dict[str, list[str]] = {}
    for line in write_log(2000, 5).lines:
        if found := re.search(r"(\S+) +req=([0-9a-f]{6}) (.*)", line):
            of_requests.setdefault(found[2], []).append(f"{found[1]} {found[3]}")
    assert len(of_requests) > 400
    for messages in of_requests.values():
        assert re.match("gateway (GET|PUT|POST) /", messages[0]) and re.match("gateway done status=", messages[-1])
        assert not any("done" in message for message in messages[:-1])


PLANTED = [Planted("a", 2, 2), Planted("a", 5, 6), Planted("b", 8, 8)]
SCORES = np.array([np.nan, 9.0, 1.0, 8.0, 7.0, 6.0, 2.0, 3.0, 5.0, 1.0])
"""By falling score: right, wrong, right (the second), right (of the second too), wrong, right (the last), ..."""


def test_precision_and_recall_at_a_threshold() -> None:
    found = alarms_above(SCORES, PLANTED, 6.0)
    assert (found.alarms, found.right, found.found) == (4, 3, 2)
    assert (found.precision, found.recall, found.by_kind) == (0.75, pytest.approx(2 / 3), {"a": 1.0, "b": 0.0})
    assert found.f1 == pytest.approx(2 * 0.75 * (2 / 3) / (0.75 + 2 / 3))
    nothing = alarms_above(SCORES, PLANTED, 10.0)
    assert (nothing.alarms, nothing.precision, nothing.recall, nothing.f1) == (0, 1.0, 0.0, 0.0)


def test_the_curve_is_that_of_all_thresholds() -> None:
    curve = curve_of(SCORES, PLANTED)
    assert curve.above.tolist() == [9, 8, 7, 6, 5, 3, 2, 1]
    assert curve.precision == pytest.approx([1, 1 / 2, 2 / 3, 3 / 4, 3 / 5, 4 / 6, 4 / 7, 4 / 9])
    assert curve.recall == pytest.approx([1 / 3, 1 / 3, 2 / 3, 2 / 3, 2 / 3, 1, 1, 1])
    assert curve.average_precision == pytest.approx((1 + 2 / 3 + 4 / 6) / 3)
    assert curve.best == 3.0
    for number, above in enumerate(curve.above):
        alarms = alarms_above(SCORES, PLANTED, above)
        assert (alarms.precision, alarms.recall) == (curve.precision[number], curve.recall[number])


def test_lines_that_are_rare_or_of_another_length_stand_out() -> None:
    usual = [f"2026 INFO worker heartbeat queue={number}" for number in range(60)]
    log = ServiceLog([*usual, "a line that is longer than all of those that were before it", usual[0]], [])
    length, rarity = by_length(log), by_rarity(log, usual)
    assert np.isnan(length[:30]).all() and np.nanargmax(length) == 60 == rarity.argmax()
    assert rarity[60] == pytest.approx(np.log2(121)) and rarity[61] < 0.1
    assert template("req=0b55d6 took 31ms on host7") == "req=# took #ms on host#"


def test_the_tool_writes_a_log_and_measures_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "runs" / "tiny")
    monkeypatch.chdir(tmp_path)
    for words in (
        "write normal.log --lines 300 --each 1 --truth truth.json --seed 2",
        "measure runs/tiny --normal normal.log --lines 700 --each 1 --json found.json --plot found.png",
    ):
        monkeypatch.setattr(sys, "argv", [str(TOOL), *words.split()])
        runpy.run_path(str(TOOL), run_name="__main__")
    shown = capsys.readouterr().out
    assert "6 anomalies" in shown and "tiny, bits per byte" in shown and "rarity of the template" in shown
    assert max(map(len, shown.splitlines())) <= 80
    assert {one["kind"] for one in json.loads(Path("truth.json").read_text())} == set(ANOMALIES)
    methods = json.loads(Path("found.json").read_text())["methods"]
    assert len(methods) == 6 and methods[0]["curve"]["recall"][-1] <= 1 and Path("found.png").stat().st_size > 1000
