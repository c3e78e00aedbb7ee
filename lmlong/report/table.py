"""Tables for a terminal: columns of aligned cells, each computed from its row."""

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any, Literal, NamedTuple

Cell = Any
"""A string, a number, or None for an empty cell."""

Value = str | Callable[[Any], Any]
"""What to take from a row: the path of an attribute, such as "sums.totals.nats", or a function of the row."""


class Column(NamedTuple):
    """One column: its title, its width in a terminal, how its numbers are formatted, and how it is computed from a
    row."""

    title: str
    width: int = 0
    format: str | Callable[[Any], str] = ""
    align: Literal["<", ">"] = ">"
    value: Value | None = None
    """With None, rows are sequences of cells, and the column shows the one at its own index."""


def with_error(column: Column, width: int = 8) -> tuple[Column, Column]:
    """Return the columns of a number and of its standard error, where `column.value` gives the pair of both."""
    assert column.value is not None
    value = getter(column.value)
    error = Column("±", width, str(column.format).lstrip("+"), value=lambda row: value(row)[1])
    return column._replace(value=lambda row: value(row)[0]), error


def getter(value: Value) -> Callable[[Any], Any]:
    """Return the function that takes a value from a row."""
    return attrgetter(value) if isinstance(value, str) else value


def format_table(columns: Sequence[Column], rows: Iterable[Any]) -> list[str]:
    """Return the line of titles and a line for each row; a row of cells may be shorter than the columns."""
    titles = [column.title for column in columns]
    return [_line(columns, texts) for texts in (titles, *(cell_texts(columns, row) for row in rows))]


def pivot_rows(
    first: Sequence[Hashable],
    second: Sequence[Hashable],
    cells: Mapping[tuple[Any, Any], Sequence[Cell]],
    missing: Cell = None,
) -> list[list[Cell]]:
    """Return a row of cells for each of the first keys, which begins with the key, with the cells of each of the second
    keys; a pair of keys without cells has `missing`."""
    return [[key, *(cell for other in second for cell in cells.get((key, other), [missing]))] for key in first]


def format_number(value: float, form: str = "") -> str:
    """Return a number in a format, or a dash for nan. What rounds to zero has no minus sign."""
    if math.isnan(value):
        return "-"
    text = format(value, form)
    return text if text.strip("+-0.") else format(abs(value), form)


def three_digits(value: float) -> str:
    """Return a positive number with about three digits, or a dash for nan."""
    return format_number(value, ",.2f" if value < 10 else ",.1f" if value < 100 else ",.0f")


def format_range(first: int, last: int) -> str:
    """Return '1,024 to 2,047', or one number where both are the same."""
    return f"{first:,}" if first == last else f"{first:,} to {last:,}"


def plural(count: int, noun: str) -> str:
    """Return '1 text' or '2,000 texts'."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def in_words(value: Any) -> str:
    """Return a value of any kind, also lists and dicts of them, as people read it."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.4f}"
    if isinstance(value, list) and any(isinstance(part, float) for part in value):
        return " ".join("-" if part is None else f"{part:,.4g}" for part in value)
    if isinstance(value, list):
        return ", ".join(map(str, value))
    if isinstance(value, dict):
        # a colon after a name of several words, whose end would not be seen
        parts = {name.replace("_", " "): in_words(part) for name, part in value.items()}
        return ", ".join(f"{name}: {part}" if " by " in name else f"{name} {part}" for name, part in parts.items())
    return str(value)


def cell_texts(columns: Sequence[Column], row: Any) -> list[str]:
    """Return the texts of the cells of a row, which may be fewer than the columns."""
    cells = [
        row[index] if column.value is None else getter(column.value)(row)
        for index, column in enumerate(columns)
        if column.value is not None or index < len(row)
    ]
    return [_text(cell, column.format) for cell, column in zip(cells, columns, strict=False)]


def _line(columns: Sequence[Column], texts: Sequence[str]) -> str:
    filled = zip(columns, texts, strict=False)
    return "".join(f"{text:{column.align}{column.width}}" for column, text in filled).rstrip()


def _text(cell: Cell, form: str | Callable[[Any], str]) -> str:
    if cell is None or isinstance(cell, str):
        return cell or ""
    return form(cell) if callable(form) else format_number(cell, form)
