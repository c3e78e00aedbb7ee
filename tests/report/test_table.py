"""Aligned columns, and the reports that they are in."""

import json
import math
from typing import NamedTuple

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
