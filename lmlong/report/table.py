"""Tables for a terminal: columns of aligned cells."""

import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

Cell = Any  # a string, a number, or None for an empty cell


class Column(NamedTuple):
    """One column: its title, its width, and how its numbers are formatted."""

    title: str
    width: int
    format: str = ""
    align: Literal["<", ">"] = ">"


def format_table(columns: Sequence[Column], rows: Iterable[Sequence[Cell]]) -> list[str]:
    """Return the line of titles and a line for each row; a row may be shorter than the columns."""
    return [_line(columns, [column.title for column in columns]), *format_rows(columns, rows)]


def format_rows(columns: Sequence[Column], rows: Iterable[Sequence[Cell]]) -> list[str]:
    """Return a line for each row, without titles."""
    return [_line(columns, row) for row in rows]


def format_number(value: float, form: str = "") -> str:
    """Return a number in a format, or a dash for nan."""
    return "-" if math.isnan(value) else format(value, form)


def three_digits(value: float) -> str:
    """Return a positive number with about three digits, or a dash for nan."""
    return format_number(value, ",.2f" if value < 10 else ",.1f" if value < 100 else ",.0f")


def format_range(first: int, last: int) -> str:
    """Return '1,024 to 2,047', or one number where both are the same."""
    return f"{first:,}" if first == last else f"{first:,} to {last:,}"


def plural(count: int, noun: str) -> str:
    """Return '1 text' or '2,000 texts'."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _line(columns: Sequence[Column], cells: Sequence[Cell]) -> str:
    filled = zip(columns, cells, strict=False)
    return "".join(f"{_text(cell, column.format):{column.align}{column.width}}" for column, cell in filled).rstrip()


def _text(cell: Cell, form: str) -> str:
    if cell is None:
        return ""
    return cell if isinstance(cell, str) else format_number(cell, form)
