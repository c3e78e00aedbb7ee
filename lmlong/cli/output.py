"""The output of a command: a table, JSON and a plot."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lmlong.errors import UsageError
from lmlong.io.system_errors import explain_errors
from lmlong.report.json_values import json_values

if TYPE_CHECKING:
    from lmlong.report.figure import Figure

STDOUT = Path("-")


def check_writable(file: Path) -> None:
    """Raise a UsageError for a file that cannot be written."""
    if file == STDOUT:
        return
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise UsageError(f"{file}: its folder is missing or cannot be written to. Create it, or name another file.")
    if not file.exists():
        with explain_errors(file):  # not every file system reports it in advance
            file.touch()
            file.unlink()


def show(
    table: str,
    result: Any,
    json_file: Path | None,
    plot: Path | None = None,
    draw: "Callable[[], Figure] | None" = None,
) -> None:
    """Print the table, or JSON instead if `json_file` is standard output; write the JSON file, and to `plot` the figure
    that `draw` returns."""
    if plot and draw:
        from lmlong.report.plot import save

        with explain_errors(plot):
            save(draw(), plot)
    if json_file != STDOUT:
        click.echo(table)
    if json_file:
        with explain_errors(json_file), click.open_file(str(json_file), "w", encoding="utf-8") as out:
            out.write(json.dumps(json_values(result), indent=2, allow_nan=False) + "\n")
