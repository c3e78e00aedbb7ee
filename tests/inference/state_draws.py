"""State files damaged or exchanged at random, and the real command that goes on from each, in this process.

A number stands for the same damage on every machine. Whatever is changed in a file must be seen: the digest in it is of
all that it holds. A file that is whole gives the text that it always gave.
"""

import contextlib
import io
import json
import os
import shutil
import struct
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import NamedTuple

from lmlong.cli import main as cli

RECIPE = """
name: drawn
text: {{sources: [{{kind: files, paths: [{book}]}}], tokenizer: {{kind: bytes}}, sequence_length: 16}}
model: {{width: 16, layers: 2, heads: 2, attention: {{kind: [linear, window], window: 8}}}}
training: {{steps: 2, batch_size: 2, precision: "32"}}
"""

REFUSED = (2, 4)
"""Exit codes of a state that cannot be used: it is no file, or none of this model."""


class Place(NamedTuple):
    """A folder with two models, a state of each, and the text that the first goes on with."""

    folder: Path
    state: bytes
    others: bytes
    text: str

    @property
    def file(self) -> Path:
        return self.folder / "drawn.state"


def prepare(folder: Path) -> Place:
    """Train two models that differ in nothing but their seed, and save a state of each."""
    (folder / "book.txt").write_text("once upon a time there was a book. " * 60)
    (folder / "drawn.yaml").write_text(RECIPE.format(book=folder / "book.txt"))
    for seed in (0, 1):
        run = str(folder / f"run{seed}")
        assert lmlong("train", str(folder / "drawn.yaml"), f"seed={seed}", "--out", run)[0] == 0
        saved = ("--max-tokens", "0", "--save-state", f"{run}.state")
        assert lmlong("generate", run, "--prompt", "once upon", *saved)[0] == 0
    states = [(folder / f"run{seed}.state").read_bytes() for seed in (0, 1)]
    place = Place(folder, *states, "")
    place.file.write_bytes(place.state)
    code, text, told = go_on(place)
    assert code == 0 and text, told
    return place._replace(text=text)


def go_on(place: Place) -> tuple[int | None, str, str]:
    """Go on from the drawn state: the exit code, the text, and the messages."""
    words = ("--load-state", str(place.file), "--prompt", "", "--max-tokens", "8", "--temperature", "0")
    return lmlong("generate", str(place.folder / "run0"), *words)


def lmlong(*words: str) -> tuple[int | None, str, str]:
    output, told, code = io.StringIO(), io.StringIO(), None
    before, sys.argv = sys.argv, ["lmlong", *words]
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(told):
            cli.main()
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else None
    except BaseException:
        told.write(traceback.format_exc())
    finally:
        sys.argv = before
    return code, output.getvalue(), told.getvalue()


def header(state: bytes) -> int:
    """Return the bytes before the tensors of a file: eight that tell the size of the rest, and the rest."""
    return 8 + int.from_bytes(state[:8], "little")


def truncated(draw: Random, place: Place) -> bytes:
    return place.state[: draw.randrange(len(place.state))]


def flipped_header(draw: Random, place: Place) -> bytes:
    return _flipped(draw, place.state, 0, header(place.state))


def flipped_tensors(draw: Random, place: Place) -> bytes:
    return _flipped(draw, place.state, header(place.state), len(place.state))


def _flipped(draw: Random, state: bytes, begin: int, end: int) -> bytes:
    found = bytearray(state)
    for at in draw.sample(range(begin, end), draw.choice((1, 1, 2, 20))):
        found[at] ^= 1 << draw.randrange(8)
    return bytes(found)


def of_another_model(draw: Random, place: Place) -> bytes:
    return place.others


def tensors_of_another(draw: Random, place: Place) -> bytes:
    """The header of one file with the tensors of the other."""
    return place.state[: header(place.state)] + place.others[header(place.others) :]


def another_header(draw: Random, place: Place) -> bytes:
    """A header whose JSON is changed in one place, and is written as it would be."""
    size = header(place.state)
    found = json.loads(place.state[8:size])
    about = json.loads(found["__metadata__"]["lmlong"])
    value = draw.choice((None, -1, 0, 10**30, "x", [], {}, 1.5, True))
    match draw.randrange(3):
        case 0:
            about[draw.choice(["format", *about])] = value
            found["__metadata__"]["lmlong"] = json.dumps(about)
        case 1:
            del found[draw.choice(list(found))]
        case _:
            name = draw.choice(list(found))
            found[name] = draw.choice((value, {**found[name], draw.choice(list(found[name])): value}))
    text = json.dumps(found).encode()
    return struct.pack("<Q", len(text)) + text + place.state[size:]


def huge_header(draw: Random, place: Place) -> bytes:
    return struct.pack("<Q", draw.choice((2**63, 2**64 - 1, 2**40, 100_000_001, 99_999_999))) + place.state[8:]


def longer(draw: Random, place: Place) -> bytes:
    return place.state + draw.randbytes(draw.choice((1, 8, 1000)))


def noise(draw: Random, place: Place) -> bytes:
    return draw.choice((b"", b"\0", b"{}", draw.randbytes(500), struct.pack("<Q", 2) + b"{}", b"\0" * 4096))


BYTES: tuple[Callable[[Random, Place], bytes], ...] = (
    *(truncated, flipped_header, flipped_header, flipped_tensors, flipped_tensors),
    *(of_another_model, tensors_of_another, another_header, another_header, huge_header, longer, noise),
)


def whole(place: Place) -> None:
    place.file.write_bytes(place.state)


def link(place: Place) -> None:
    place.file.symlink_to(place.folder / "run0.state")


def link_to_nothing(place: Place) -> None:
    place.file.symlink_to(place.folder / "nothing.state")


def link_in_a_circle(place: Place) -> None:
    place.file.symlink_to(place.file)


def folder(place: Place) -> None:
    place.file.mkdir()


def device(place: Place) -> None:
    place.file.symlink_to(os.devnull)


def missing(place: Place) -> None:
    pass


PLACES: dict[Callable[[Place], None], bool] = {
    **dict.fromkeys((whole, link), True),
    **dict.fromkeys((link_to_nothing, link_in_a_circle, folder, device, missing), False),
}
"""What may stand at the path of a state, and whether it is one."""


def try_state(number: int, place: Place) -> tuple[str, list[str]]:
    """Put the state of a number in its place and go on from it: the name of the damage, and all that is wrong."""
    draw, sound = Random(number), False
    clean(place.file)
    if draw.random() < 0.1:
        put, sound = draw.choice(list(PLACES.items()))
        put(place)
        name = put.__name__
    else:
        damage = draw.choice(BYTES)
        content = damage(draw, place)
        place.file.write_bytes(content)
        name, sound = damage.__name__, content == place.state
    return name, list(_complaints(place, sound))


def _complaints(place: Place, sound: bool) -> Iterator[str]:
    code, text, told = go_on(place)
    if "Traceback" in told:
        yield told
    if sound and (code, text) != (0, place.text):
        yield f"a state that is whole gave exit code {code} and {text!r}"
    if not sound and (code not in REFUSED or text):
        yield f"what was damaged gave exit code {code} and {text!r}"
    if not sound and place.file.name not in told:
        yield f"the message does not name the file: {told}"


def clean(file: Path) -> None:
    if file.is_symlink() or file.is_file():
        file.unlink()
    elif file.exists():
        shutil.rmtree(file)
