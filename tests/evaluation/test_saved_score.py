"""Saved scores that anybody may have made: refused with a message, or continued; never another exception."""

import json
import zipfile
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from click.testing import CliRunner
from inference.conftest import prose
from inference.conftest import run as run
from safetensors.torch import load_file, save_file

from lmlong.cli.score import score
from lmlong.errors import LmlongError
from lmlong.inference import state_file

VALUES = (
    None,
    True,
    -1,
    0,
    1,
    2**31,
    2**63,
    2**64,
    10**30,
    -(10**30),
    1.5,
    -0.5,
    1e308,
    "",
    "x",
    "ff",
    [],
    {},
    [0],
    [[]],
)
RECORDS = b"".join(b'{"host": "a%d", "message": "to be or not"}\n' % (number % 3) for number in range(60))


OPTIONS = ("--by", "record", "--field", "message", "--streams", "host")


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


def complaint(*words: object, piped: bytes) -> str | None:
    """Return what `lmlong score` ends with that is not a message; None where it is one, or where it scores."""
    done = CliRunner().invoke(score, [str(word) for word in words], input=piped)
    if done.exception is None or isinstance(done.exception, LmlongError):
        return None
    return repr(done.exception)


def test_of_a_text(run: Path, tmp_path: Path) -> None:
    file, crafted = tmp_path / "text.state", tmp_path / "crafted.state"
    assert CliRunner().invoke(score, [str(run), "--save-state", str(file)], input=prose(300).encode()).exit_code == 0
    tensors, about = load_file(file), state_file.describe(file)
    about.pop("sha256")
    wrong = {}
    for number in range(60):
        new = {**about, "score": changed(Random(number), about["score"])}
        digest = state_file._digest(new, tensors)
        save_file(tensors, crafted, {"lmlong": json.dumps({**new, "sha256": digest})})
        if found := complaint(run, "--load-state", crafted, piped=prose(40).encode()):
            wrong[number] = found, new["score"]
    assert not wrong


@pytest.fixture
def saved(run: Path, tmp_path: Path) -> Iterator[tuple[Path, dict[str, Any], dict[str, bytes]]]:
    """A file of saved records: its path, its JSON, and its other entries."""
    file = tmp_path / "records.state"
    done = CliRunner().invoke(score, [str(run), *OPTIONS, "--save-state", str(file)], input=RECORDS)
    assert done.exit_code == 0, done.output
    with zipfile.ZipFile(file) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    yield file, json.loads(entries.pop("score.json")), entries


def write(file: Path, about: Any, entries: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> None:
    with zipfile.ZipFile(file, "w", compression) as archive:
        for name, data in entries.items():
            archive.writestr(name, data)
        archive.writestr("score.json", about if isinstance(about, str) else json.dumps(about))


def test_of_records(run: Path, saved: tuple[Path, dict, dict], tmp_path: Path) -> None:
    _, about, entries = saved
    crafted, wrong = tmp_path / "crafted.state", {}
    words = (run, *OPTIONS, "--load-state", crafted)
    for number in range(40):
        write(crafted, new := changed(Random(number), about), entries)
        if found := complaint(*words, piped=RECORDS[:400]):
            wrong[number] = found, new
    assert not wrong


def test_a_file_that_is_larger_than_it_seems(run: Path, saved: tuple[Path, dict, dict], tmp_path: Path) -> None:
    _, about, entries = saved
    crafted = tmp_path / "crafted.state"
    write(crafted, json.dumps(about) + " " * 10**7, entries, zipfile.ZIP_DEFLATED)
    words = [str(run), *OPTIONS, "--load-state", str(crafted)]
    done = CliRunner().invoke(score, words, input=RECORDS)
    assert isinstance(done.exception, LmlongError) and "damaged" in str(done.exception)


def test_damage(run: Path, saved: tuple[Path, dict, dict], tmp_path: Path) -> None:
    file, _, _ = saved
    crafted, data, wrong = tmp_path / "crafted.state", file.read_bytes(), {}
    words = (run, *OPTIONS, "--load-state", crafted)
    for number in range(40):
        draw, found = Random(number), bytearray(data)
        for at in draw.sample(range(max(0, len(found) - 2000), len(found)), draw.choice((1, 2, 20))):
            found[at] = draw.randrange(256)
        crafted.write_bytes(found)
        if complained := complaint(*words, piped=RECORDS[:400]):
            wrong[number] = complained
    assert not wrong
