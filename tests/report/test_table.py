"""Aligned columns."""

import math

import pytest

from lmlong.report.table import (
    Column,
    format_number,
    format_range,
    format_rows,
    format_table,
    plural,
    three_digits,
)

COLUMNS = [Column("name", 8, align="<"), Column("loss", 8, ".2f"), Column("tokens", 8, ",")]


def test_cells_are_aligned_and_formatted() -> None:
    assert format_table(COLUMNS, [["a", 1.234, 12_000], ["b", math.nan, "-"]]) == [
        "name        loss  tokens",
        "a           1.23  12,000",
        "b              -       -",
    ]


def test_a_row_may_be_short_or_have_empty_cells() -> None:
    assert format_rows(COLUMNS, [["a"], ["b", None, 1], ["c", None, None]]) == ["a", "b                      1", "c"]


@pytest.mark.parametrize(("value", "text"), [(1.234, "1.23"), (12.34, "12.3"), (1234.5, "1,234"), (math.nan, "-")])
def test_ratios_have_about_three_digits(value: float, text: str) -> None:
    assert three_digits(value) == text


def test_words_with_numbers() -> None:
    assert (plural(1, "text"), plural(2000, "text")) == ("1 text", "2,000 texts")
    assert (format_range(7, 7), format_range(1024, 2047)) == ("7", "1,024 to 2,047")
    assert (format_number(0.5, ".3f"), format_number(math.nan, ".3f")) == ("0.500", "-")
