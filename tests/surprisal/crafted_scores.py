"""Saved scores that anybody may have made: values changed at random, under a digest that is right.

A number stands for the same file on every machine. `lmlong score` refuses such a file with a message, or continues it.
"""

import json
import zipfile
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
RECORDS = b"".join(b'{"host": "a%d", "message": "to be or not"}\n' % (number % 3) for number in range(60))
OPTIONS = ("--by", "record", "--field", "message", "--streams", "host")


class Place(NamedTuple):
    """A run, a saved score of a text, and one of records."""

    folder: Path
    run: Path
    tensors: dict[str, Tensor]
    about: dict[str, Any]
    records: Path
    entries: dict[str, bytes]

    @property
    def crafted(self) -> Path:
        return self.folder / "crafted.state"


def prepare(folder: Path) -> Place:
    run, text, records = (
        write_run(folder / "tiny", ByteTokenizer(), "bytes"),
        folder / "text.state",
        folder / "records.state",
    )
    for words, data in ((["--save-state", text], prose(300).encode()), ([*OPTIONS, "--save-state", records], RECORDS)):
        done = CliRunner().invoke(score, [str(word) for word in (run, *words)], input=data)
        assert done.exit_code == 0, done.output
    with zipfile.ZipFile(records) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    about = state_file.describe(text)
    about.pop("sha256")
    return Place(folder, run, load_file(text), about, records, entries)


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


def of_a_text(draw: Random, place: Place) -> tuple[str, ...]:
    write_text(place, changed(draw, place.about["score"]))
    return ()


def write_text(place: Place, saved: dict[str, Any]) -> None:
    """Write the state of a text with another saved score."""
    about = {**place.about, "score": saved}
    digest = state_file._digest(about, place.tensors)
    save_file(place.tensors, place.crafted, {"lmlong": json.dumps({**about, "sha256": digest})})


def of_records(draw: Random, place: Place) -> tuple[str, ...]:
    about = changed(draw, json.loads(place.entries["score.json"]))
    write(place.crafted, json.dumps(about), place.entries)
    return OPTIONS


def damaged(draw: Random, place: Place) -> tuple[str, ...]:
    data = bytearray(place.records.read_bytes())
    for at in draw.sample(range(max(0, len(data) - 2000), len(data)), draw.choice((1, 2, 20))):
        data[at] = draw.randrange(256)
    place.crafted.write_bytes(data)
    return OPTIONS


def write(file: Path, about: str, entries: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> None:
    """Write a saved score of records, whose JSON is `about`."""
    with zipfile.ZipFile(file, "w", compression) as archive:
        for name, data in {**entries, "score.json": about.encode()}.items():
            archive.writestr(name, data)


def try_score(number: int, place: Place) -> tuple[str, list[str]]:
    """Continue the score of a number; return what came of it and what is wrong."""
    draw = Random(number)
    craft = draw.choice((of_a_text, of_a_text, of_records, damaged))
    options = craft(draw, place)
    data = RECORDS[:400] if options else prose(40).encode()
    words = [str(word) for word in (place.run, *options, "--load-state", place.crafted)]
    done = CliRunner().invoke(score, words, input=data)
    if isinstance(done.exception, LmlongError):
        return "refused", []
    return "scored", [] if done.exception is None else [f"{craft.__name__}: {done.exception!r}"]
