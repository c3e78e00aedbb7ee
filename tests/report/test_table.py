"""Aligned columns."""

import math
from typing import NamedTuple

import pytest

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


def test_cells_are_aligned_and_formatted() -> None:
    assert format_table(COLUMNS, [["a", 1.234, 12_000], ["b", math.nan, "-"]]) == [
        "name        loss  tokens",
        "a           1.23  12,000",
        "b              -       -",
    ]


def test_a_row_may_be_short_or_have_empty_cells() -> None:
    assert format_table(COLUMNS, [["a"], ["b", None, 1], ["c", None, None]])[1:] == [
        "a",
        "b                      1",
        "c",
    ]


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


@pytest.mark.parametrize(("value", "text"), [(1.234, "1.23"), (12.34, "12.3"), (1234.5, "1,234"), (math.nan, "-")])
def test_ratios_have_about_three_digits(value: float, text: str) -> None:
    assert three_digits(value) == text


@pytest.mark.parametrize(
    ("value", "form", "text"),
    [(-1e-9, ".4f", "0.0000"), (-1e-9, "+.2f", "+0.00"), (-0.5, ".1f", "-0.5"), (-3, ",", "-3"), (math.nan, "", "-")],
)
def test_a_number_that_rounds_to_zero_has_no_minus_sign(value: float, form: str, text: str) -> None:
    assert format_number(value, form) == text


def test_words_with_numbers() -> None:
    assert (plural(1, "text"), plural(2000, "text")) == ("1 text", "2,000 texts")
    assert (format_range(7, 7), format_range(1024, 2047)) == ("7", "1,024 to 2,047")
    assert (format_number(0.5, ".3f"), format_number(math.nan, ".3f")) == ("0.500", "-")
