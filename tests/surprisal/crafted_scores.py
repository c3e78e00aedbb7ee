"""Saved scores from strangers: `lmlong score` refuses such a file with a message, or continues it."""

from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from click.testing import CliRunner
from crafted_values import changed, write_state
from inference.conftest import prose
from models import write_run
from safetensors.torch import load_file
from torch import Tensor

from lmlong.cli.score import score
from lmlong.errors import LmlongError
from lmlong.inference import state_file

RECORDS = b'{"message": "to be or not"}\n' * 60
OPTIONS = ("--by", "record", "--field", "message")


class Place(NamedTuple):
    """A run, and the metadata and tensors of its saved scores of a text and of records."""

    folder: Path
    run: Path
    text: tuple[dict[str, Any], dict[str, Tensor]]
    records: tuple[dict[str, Any], dict[str, Tensor]]

    @property
    def crafted(self) -> Path:
        return self.folder / "crafted.state"


def prepare(folder: Path) -> Place:
    run, files = folder / "tiny", []
    write_run(run, deviation=1.0, width=16, heads=2, attention={"kind": "linear"})
    for options, data in (((), prose(300).encode()), (OPTIONS, RECORDS)):
        file = folder / "saved.state"
        words = [str(word) for word in (run, *options, "--save-state", file)]
        done = CliRunner().invoke(score, words, input=data)
        assert done.exit_code == 0, done.output
        about = state_file.describe(file)
        files.append((about, load_file(file)))
    return Place(folder, run, *files)


def write(file: Path, about: dict[str, Any], tensors: dict[str, Tensor], saved: Any) -> None:
    """Write a state file with another saved score."""
    write_state(file, {**about, "score": saved}, tensors)


def try_score(draw: Random, place: Place) -> tuple[str, list[str]]:
    """Continue a drawn score; return the outcome, and what is wrong."""
    options, data, (about, tensors) = draw.choice(
        (((), prose(40).encode(), place.text), (OPTIONS, RECORDS[:400], place.records))
    )
    write(place.crafted, about, tensors, changed(draw, about["score"]))
    words = [str(word) for word in (place.run, *options, "--load-state", place.crafted)]
    done = CliRunner().invoke(score, words, input=data)
    if isinstance(done.exception, LmlongError):
        return "refused", []
    return "scored", [] if done.exception is None else [repr(done.exception)]
