"""Aligned columns, the reports that they are in, and results as JSON."""

import dataclasses
import json
import math
from typing import NamedTuple

import numpy as np

from lmlong.report.json_values import json_keys, json_values
from lmlong.report.report import Report, Table
from lmlong.report.table import (
    Column,
    format_number,
    format_range,
    format_table,
    pivot_rows,
    plural,
    three_digits,
    with_error,
)

COLUMNS = [Column("name", 8, align="<"), Column("loss", 8, ".2f"), Column("tokens", 8, ",")]


def test_cells_are_aligned_and_formatted_and_a_row_may_be_short() -> None:
    rows = [["a", 1.234, 12_000], ["b", math.nan, "-"], ["c"], ["d", None, 1], ["e", None, None]]
    assert format_table(COLUMNS, rows) == [
        "name        loss  tokens",
        "a           1.23  12,000",
        "b              -       -",
        "c",
        "d                      1",
        "e",
    ]


def test_parts_of_a_report_are_apart_and_a_table_follows_its_title() -> None:
    table = Table("two runs\nin nats", COLUMNS[:2], [["a", 1.0]])
    report = Report(["verdict", table, Table("", COLUMNS[:1], [])], {"loss": [1.0, math.nan]})
    assert report.text() == "verdict\n\ntwo runs\nin nats\nname        loss\na           1.00\n\nname"
    assert json.loads(report.json()) == {"loss": [1.0, None]}


class Loss(NamedTuple):
    name: str
    nats: tuple[float, float]


def test_columns_take_their_cells_from_a_row_by_a_path_or_a_function() -> None:
    columns = [
        Column("name", 6, align="<", value="name"),
        *with_error(Column("change", 9, "+.2f", value="nats")),
        Column("in all", 8, lambda number: f"{number:.0f} B", value=lambda row: sum(row.nats)),
    ]
    assert format_table(columns, [Loss("a", (1.5, 0.25)), Loss("b", (2, 1))]) == [
        "name     change       ±  in all",
        "a         +1.50    0.25     2 B",
        "b         +2.00    1.00     3 B",
    ]


def test_pairs_of_keys_become_rows_and_columns() -> None:
    cells = {(1, "a"): ("x", "y"), (2, "b"): ("z",)}
    assert pivot_rows([1, 2], ["a", "b"], cells, "-") == [[1, "x", "y", "-"], [2, "-", "z"]]


NUMBERS = [
    *((-1e-9, ".4f", "0.0000"), (-1e-9, "+.2f", "+0.00"), (-0.5, ".1f", "-0.5"), (-3, ",", "-3")),
    *((0.5, ".3f", "0.500"), (math.nan, ".3f", "-"), (math.nan, "", "-")),
]


def test_numbers_as_text() -> None:
    assert [format_number(value, form) for value, form, _ in NUMBERS] == [text for *_, text in NUMBERS]
    assert [three_digits(value) for value in (1.234, 12.34, 1234.5, math.nan)] == ["1.23", "12.3", "1,234", "-"]
    assert (plural(1, "text"), plural(2000, "text")) == ("1 text", "2,000 texts")
    assert (format_range(7, 7), format_range(1024, 2047)) == ("7", "1,024 to 2,047")


class Point(NamedTuple):
    x: int
    y: float


@dataclasses.dataclass
class Curve:
    name: str
    points: list[Point]


@json_keys("run=name", "*last", "x=curve.points", "total")
class Run(NamedTuple):
    name: str
    curve: Curve
    right: list[int]

    @property
    def last(self) -> Point:
        return self.curve.points[-1]

    @property
    def total(self) -> int:
        return sum(self.right)


def test_results_become_plain_values_and_what_is_no_number_becomes_null() -> None:
    curve = Curve("a", [Point(1, math.nan), Point(2, math.inf), Point(3, 0.5)])
    values = json_values({"curve": curve, "rows": np.array([[1.0, np.nan]]), "count": np.int64(3), "none": None})
    points = [{"x": 1, "y": None}, {"x": 2, "y": None}, {"x": 3, "y": 0.5}]
    assert values == {"curve": {"name": "a", "points": points}, "rows": [[1.0, None]], "count": 3, "none": None}
    assert json.loads(json.dumps(values, allow_nan=False)) == values


def test_a_class_declares_its_keys_as_fields_properties_paths_and_all_keys_of_a_part() -> None:
    run = Run("a", Curve("b", [Point(1, 0.5)]), [1, 2])
    assert json_values([run]) == [{"run": "a", "x": [{"x": 1, "y": 0.5}], "y": 0.5, "total": 3}]
