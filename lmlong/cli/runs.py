"""The runs that a command measures, one after the other, each with its text."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import click

if TYPE_CHECKING:
    from lmlong.data.token_file import TokenFile
    from lmlong.inference.loading import TrainedModel

Model = TypeVar("Model", bound="TrainedModel")


def load_runs(
    runs: Sequence[str], load: Callable[[str], Model], data: Sequence[str], tokens: int | None
) -> Iterator[tuple[str, Model, "TokenFile"]]:
    """Yield the name, the model and the text of each run; the text is its held-out one, unless `data` names files."""
    from lmlong.evaluation.perplexity import validation_text

    report_left_out(data)
    for run in runs:
        model = load(run)
        yield run_name(run), model, validation_text(model, data, tokens)


def report_left_out(data: Sequence[str]) -> None:
    """Print to standard error which files of --data are not read, and why; refuse paths without files."""
    from lmlong.data.notes import by_reason, notes
    from lmlong.data.source_files import find_files

    left_out = find_files(list(data), "text").left_out
    for line in notes({"left_out": by_reason(left_out)}):
        click.echo(f"--data: {line}", err=True)


def near(path: str) -> str:
    """Return a path as seen from the current folder, where it is below that."""
    here = Path.cwd()
    return str(Path(path).relative_to(here)) if Path(path).is_relative_to(here) else path


def run_name(run: str) -> str:
    """Return the name of a run in tables and plots: its path without runs/."""
    return run.rstrip("/").removeprefix("runs/")
