"""What is shown of a result: a text of tables, values for JSON, and a figure."""

import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from lmlong.report.figure import Figure
from lmlong.report.json_values import json_values
from lmlong.report.table import Column, format_table


class Table(NamedTuple):
    """Rows of a result, under a title of any number of lines."""

    title: str
    columns: Sequence[Column]
    rows: Sequence[Any]

    def __str__(self) -> str:
        return "\n".join([*self.title.splitlines(), *format_table(self.columns, self.rows)])


class Report(NamedTuple):
    """A result as commands show it."""

    parts: Sequence[str | Table]
    """Paragraphs and tables, which an empty line separates."""
    values: Any
    """What JSON holds: see `json_values`."""
    figure: Callable[[], Figure] | None = None

    def text(self) -> str:
        """Return the text for a terminal of 80 columns; long names make it wider."""
        return "\n\n".join(map(str, self.parts))

    def json(self) -> str:
        """Return the values as JSON."""
        return json.dumps(json_values(self.values), indent=2, allow_nan=False) + "\n"
