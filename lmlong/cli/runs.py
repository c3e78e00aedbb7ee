"""The runs that a command measures, one after the other, each with its text."""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from lmlong.data.token_file import TokenFile
    from lmlong.inference.loading import TrainedModel

Model = TypeVar("Model", bound="TrainedModel")


def load_runs(
    runs: Sequence[str], load: Callable[[str], Model], data: Sequence[str], tokens: int | None
) -> Iterator[tuple[str, Model, "TokenFile"]]:
    """Yield the name, the model and the text of each run; the text is its held-out one, unless `data` names files."""
    from lmlong.evaluation.perplexity import validation_text

    for run in runs:
        model = load(run)
        yield run_name(run), model, validation_text(model, data, tokens)


def run_name(run: str) -> str:
    """Return the name of a run in tables and plots: its path without runs/."""
    return run.rstrip("/").removeprefix("runs/")
