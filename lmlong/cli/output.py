"""The output of a command: text, JSON and a plot, and the names in them."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lmlong.errors import UsageError
from lmlong.io.system_errors import explain_errors

if TYPE_CHECKING:
    from lmlong.report.figure import Figure
    from lmlong.report.report import Report

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


def show(report: "Report", json_file: Path | None, plot: Path | None = None) -> None:
    """Print a report, as JSON instead of text if `json_file` is standard output; write the JSON file and the plot."""
    if plot and report.figure:
        draw(report.figure(), plot)
    if json_file != STDOUT:
        click.echo(report.text())
    if json_file:
        with explain_errors(json_file), click.open_file(str(json_file), "w", encoding="utf-8") as out:
            out.write(report.json())


def show_facts(text: str, facts: Any, json_file: Path | None) -> None:
    """Print facts as a text, or as JSON."""
    from lmlong.report.report import Report

    show(Report([text], facts), json_file)


def draw(figure: "Figure", path: Path) -> None:
    """Draw a figure into an image file."""
    from lmlong.report.plot import save

    with explain_errors(path):
        save(figure, path)


def report_left_out(data: Sequence[str]) -> None:
    """Print to standard error which files of --data are not read, and why; refuse paths without files."""
    from lmlong.data.source_files import find_files
    from lmlong.data.text_info import by_reason, notes

    left_out = find_files(list(data), "text", "--data").left_out
    for line in notes({"left_out": by_reason(left_out)}):
        click.echo(f"--data: {line}", err=True)


def near(path: str) -> str:
    """Return a path as seen from the current folder, where it is below that."""
    here = Path.cwd()
    return str(Path(path).relative_to(here)) if Path(path).is_relative_to(here) else path


def run_name(run: str) -> str:
    """Return the name of a run in tables and plots: its path without runs/."""
    return run.rstrip("/").removeprefix("runs/")
