"""Recipe files and overrides drawn at random, valid and broken, and the real command on each, in this process."""

import json
import re
import traceback
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import NamedTuple

from commands import lmlong
from crafted_values import changed, changed_bytes
from ruamel.yaml import YAML

from lmlong.recipe.file import recipe_class
from lmlong.recipe.reference import reference

COMMANDS = (
    ("recipe", "check"),
    ("recipe", "show", "--resolved"),
    ("data", "info"),
    ("train", "--dry-run"),
)

SCALARS = (
    *("0", "1", "-1", "2", "7", "64", "1e300", "-1e300", "1e-320", ".nan", ".inf", "-.inf", "9223372036854775808"),
    *("-9223372036854775809", "1" + "0" * 400, "0x10", "0o17", "1_000", "1:30", "true", "no", "null", "~", "''", "' '"),
    *("[]", "{}", "[1, 2]", "{a: 1}", "[[1], {b: [2]}]", "elu", "linear", "[linear, window]", "\u00e9", "2001-01-01"),
    *("!!python/object:os.system x", "!!binary aGk=", "!!int x", "!!float nope", "!!set {a}", "!own 1", "&a 1", "*a"),
    *("[" * 300 + "]" * 300, "{a: " * 60 + "1" + "}" * 60, '"\\0"', "'a\\nb'", "|-\n  text", "'{'", '"\\uD800"'),
)

BROKEN = (
    *(b"\x00", b"\xff\xfe", b"caf\xe9: 1\n", b"\t- x: 1\n", b"a: b: c\n", b"{", b"]", b"- 1\n", b"'open", b"\x1b"),
    *(b"? [a, b]\n: 1\n", b"a: &x [*x]\n", b"<<: 3\n", b"%YAML 9.9\n---\n", b"1: 2\n", b"null: 1\n", b"---\na: 1\n"),
)

SOUND = """name: drawn
text: {{sources: [{{kind: files, paths: [{book}]}}], tokenizer: {{kind: bytes}}, sequence_length: 16}}
model: {{width: 16, layers: 1, heads: 2}}
training: {{steps: 2, batch_size: 2, precision: "32"}}
"""


class Drawn(NamedTuple):
    """A command on a recipe file."""

    recipe: bytes
    words: tuple[str, ...]  # of the command, without the file
    overrides: tuple[str, ...]


def keys() -> list[str]:
    """Return every key that a recipe may have, in the order of the reference."""
    return list(dict.fromkeys(option.key.replace(".N", ".0") for option in reference(recipe_class())))


def draw(random: Random, book: Path) -> Drawn:
    lines = SOUND.format(book=book)
    kind, data = random.random(), lines.encode()
    if kind < 0.25:
        data = changed_bytes(random, data, BROKEN)
    elif kind < 0.5:
        data = json.dumps(changed(random, YAML(typ="safe", pure=True).load(lines))).encode()
    return Drawn(data, random.choice(COMMANDS), tuple(_overrides(random)))


def _overrides(random: Random) -> Iterator[str]:
    for _ in range(random.choice((0, 0, 0, 1, 1, 2, 3))):
        key = random.choice(keys())
        match random.random():
            case chance if chance < 0.08:
                key = "".join(random.sample(key, len(key)))
            case chance if chance < 0.16:
                key += random.choice((".0", ".x", ".", "..", ".-1", ".99999999999999999999"))
        yield random.choice((f"{key}={random.choice(SCALARS)}",) * 12 + (key, "=", f"={key}", f"{key}==", ""))


class Outcome(NamedTuple):
    """What became of a command."""

    code: int | None
    told: str
    complaints: list[str]


def prepare(folder: Path) -> Path:
    (folder / "book.txt").write_text("once upon a time there was a book. " * 60)
    return folder


def try_command(random: Random, folder: Path) -> tuple[str, list[str]]:
    """Run a drawn command; return its exit code, and what is wrong."""
    drawn = draw(random, folder / "book.txt")
    found = run(drawn, folder)
    case = f"{' '.join(drawn.words)} {drawn.overrides}\n{drawn.recipe!r}\n{found.told}"
    return f"exit code {found.code}", [*found.complaints, case] if found.complaints else []


def run(drawn: Drawn, folder: Path) -> Outcome:
    """Run a command, and complain of whatever a user should not see. A dry run takes seconds, so what is sound is
    checked in its place."""
    file = folder / "drawn.yaml"
    file.write_bytes(drawn.recipe)
    words = drawn.words
    if words[0] == "train" and _run(("recipe", "check", str(file), *drawn.overrides)).code == 0:
        words = ("recipe", "check")
    found = _run((*words[:2], str(file), *words[2:], *drawn.overrides))
    complaints = found.complaints
    if found.code not in (0, 2):
        complaints.append(f"exit code {found.code}")
    if found.code and not found.complaints and not re.search(r"(?i)^error: \S", found.told, re.MULTILINE):
        complaints.append("no message")
    if found.code == 2 and drawn.recipe.startswith(b"name: drawn") and len(drawn.overrides) == 1:
        key = drawn.overrides[0].partition("=")[0].split(".")[0]
        if key not in found.told and "drawn.yaml" not in found.told:
            complaints.append("the message names neither key nor file")
    return found


def _run(words: tuple[str, ...]) -> Outcome:
    try:
        done = lmlong(*words)
    except BaseException:
        return Outcome(None, "", [traceback.format_exc()])
    complaints = ["a traceback on standard error"] if "Traceback" in done.stderr else []
    return Outcome(done.returncode, done.stderr, complaints)
