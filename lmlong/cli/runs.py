"""The names of runs, and the files of --data that are not read."""

from collections.abc import Sequence
from pathlib import Path

import click


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
