"""Saved scores that anybody may have made: values changed at random, under a digest that is right.

A number stands for the same file on every machine. `lmlong score` refuses such a file with a message, or continues it.
"""

import json
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from click.testing import CliRunner
from inference.conftest import prose, write_run
from safetensors.torch import load_file, save_file
from torch import Tensor

from lmlong.cli.score import score
from lmlong.data.tokenizers.base import ByteTokenizer
from lmlong.errors import LmlongError
from lmlong.inference import state_file

VALUES = (
    *(None, True, -1, 0, 1, 2**31, 2**63, 2**64, 10**30, -(10**30), 1.5, -0.5, 1e308),
    *("", "x", "ff", [], {}, [0], [[]]),
)
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
    run, files = write_run(folder / "tiny", ByteTokenizer(), "bytes"), []
    for options, data in (((), prose(300).encode()), (OPTIONS, RECORDS)):
        file = folder / "saved.state"
        words = [str(word) for word in (run, *options, "--save-state", file)]
        done = CliRunner().invoke(score, words, input=data)
        assert done.exit_code == 0, done.output
        about = state_file.describe(file)
        about.pop("sha256")
        files.append((about, load_file(file)))
    return Place(folder, run, *files)


def changed(draw: Random, value: Any) -> Any:
    """Change one value somewhere in plain values."""
    if isinstance(value, dict) and value and draw.random() < 0.9:
        key = draw.choice(sorted(value))
        if draw.random() < 0.1:
            return {name: each for name, each in value.items() if name != key}
        return {**value, key: changed(draw, value[key])}
    if isinstance(value, list) and value and draw.random() < 0.9:
        at = draw.randrange(len(value))
        return draw.choice(([*value[:at], changed(draw, value[at]), *value[at + 1 :]], value * 2, value[:-1]))
    return draw.choice(VALUES)


def write(file: Path, about: dict[str, Any], tensors: dict[str, Tensor], saved: Any) -> None:
    """Write a state file with another saved score."""
    about = {**about, "score": saved}
    digest = state_file._digest(about, tensors)
    save_file(tensors, file, {"lmlong": json.dumps({**about, "sha256": digest})})


def try_score(number: int, place: Place) -> tuple[str, list[str]]:
    """Continue the score of a number; return what came of it and what is wrong."""
    draw = Random(number)
    options, data, (about, tensors) = draw.choice(
        (((), prose(40).encode(), place.text), (OPTIONS, RECORDS[:400], place.records))
    )
    write(place.crafted, about, tensors, changed(draw, about["score"]))
    words = [str(word) for word in (place.run, *options, "--load-state", place.crafted)]
    done = CliRunner().invoke(score, words, input=data)
    if isinstance(done.exception, LmlongError):
        return "refused", []
    return "scored", [] if done.exception is None else [repr(done.exception)]
