"""Random prompts of every form, valid and broken, through the command; and what it must do with each."""

import io
import json
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any, NamedTuple

from lmlong import recipe
from lmlong.cli.main import _run
from lmlong.data.formats.table import text_file
from lmlong.data.tokenizers.base import ByteTokenizer
from lmlong.data.tokenizers.factory import train_tokenizer
from lmlong.errors import UsageError
from lmlong.inference.loading import TrainedLanguageModel

from .conftest import prose, write_run

TEXTS = (
    "to be or not to be, ",
    "the question",
    " ",
    "",
    "of outr",
    "naïve 😀\n",
    "a\u2028b\x85c\u2029",
    "\ufeffthat is",
    "▁\0▁",
)
TEXTS += ("\ud800", "suffer\r\nthe slings\r", "\x1b[31m", "--- ", "é中" * 40, "and arrows " * 30)
ENDS = (b"\n", b"\n", b"\n", b"\r\n", b"\n\n", b" \n", b"")
BOM = b"\xef\xbb\xbf"


class Drawn(NamedTuple):
    """A call of the command."""

    words: list[str]
    piped: bytes | None  # standard input; none is a terminal's
    expected: list[dict[str, Any]] | None  # the lines of its prompts, or none where it must refuse them


def draw_text(draw: random.Random) -> str:
    text = "".join(draw.choices(TEXTS, k=draw.randint(1, 4)))
    return text * draw.choice([1, 1, 1, 1, 1000]) if text.strip() and draw.random() < 0.05 else text


def draw_line(draw: random.Random) -> tuple[bytes, dict[str, Any] | None]:
    """Draw a line of a file of prompts, and what it says, if that is a prompt."""
    text = draw_text(draw)
    valid: Any = draw.choice([text, {"prompt": text}, {"id": 7, "prompt": text, "more": [None, {"a": "\u2028"}]}])
    line = json.dumps(valid, ensure_ascii=draw.random() < 0.5)
    content = {"prompt": valid} if isinstance(valid, str) else valid
    if draw.random() < 0.9:
        try:
            return line.encode(), content
        except UnicodeEncodeError:  # half of a pair, which only an escape can write
            return json.dumps(valid).encode(), content
    broken: list[bytes] = [b"{", b"7", b"null", b"[]", b'["a"]', b"true", b'{"prompt": 7}', b'{"prompt": null}', b"{}"]
    broken += [
        b'{"text": "a"}',
        b"a word",
        b'"a',
        b'"a\x00b"',
        b'"a\xff"',
        b'"a" "b"',
        b'"a"\r"b"',
        b"[" * 5000,
        b"\x00",
    ]
    broken += [b"9" * 5000, b'{"prompt": "a"', b"'a'", b'"a"' + BOM, '"a"\u2028'.encode(), b'"a\\ud8"', b"\xc3"]
    return draw.choice(broken), None


def draw_prompts(draw: random.Random, file: Path) -> list[dict[str, Any]] | None:
    """Write a file of prompts, and return its prompts if all are."""
    lines = [draw_line(draw) for _ in range(draw.choice([0, 1, 2, 5]))]
    data = b"".join(
        line + (draw.choice(ENDS[:-1]) if number < len(lines) else draw.choice(ENDS))
        for number, (line, _) in enumerate(lines, 1)
    )
    file.write_bytes((BOM if draw.random() < 0.2 else b"") + data)
    found = [content for _, content in lines if content is not None]
    return found if lines and len(found) == len(lines) else None


def draw_bytes(draw: random.Random) -> tuple[bytes, list[dict[str, Any]] | None]:
    """Draw a text in bytes, which may be no UTF-8."""
    data = draw_text(draw).encode("utf-8", "surrogatepass")
    if draw.random() < 0.3:
        place = draw.randint(0, len(data))
        data = data[:place] + draw.choice([b"\xff", b"\xc3", b"\xf0\x9f", b"\xed\xa0\x80", b"\x80"]) + data[place:]
    try:
        data.decode()
    except UnicodeDecodeError:
        return data, None
    return data, [{}]


def make_runs(folder: Path) -> list[Path]:
    """Write runs of tiny models: one of bytes, one of subwords."""
    subwords = train_tokenizer([prose(3000)], recipe.Tokenizer(vocabulary=600))
    return [
        write_run(folder / "bytes", ByteTokenizer(), "bytes"),
        write_run(folder / "subwords", subwords, "sentencepiece", 0.3),
    ]


def draw_call(draw: random.Random, run: Path, folder: Path) -> Drawn:
    """Draw a call of `lmlong generate`."""
    file, words, piped = folder / "prompts", ["generate", str(run), "--device", "cpu"], None
    words += ["--max-tokens", draw.choice(["0", "1", "3", "8"]), "--seed", str(draw.randrange(9))]
    words += draw.choice([[], ["--temperature", "0"], ["--temperature", "1.5", "--top-k", "9"], ["--min-p", "0.1"]])
    words += draw.choice([[], [], ["--no-heal"], ["--stop", "e"], ["--stop", " to", "--stop", "\n"]])
    words += draw.choice([[], [], ["--no-fast-decode"], ["--repetition-penalty", "1.3"], ["--stats"]])
    kind, expected = draw.choice(["many", "many", "many", "file", "file", "pipe", "word", "nothing"]), None
    if kind == "many":
        expected = draw_prompts(draw, file)
        words += ["--prompts", str(file), "--batch", draw.choice(["1", "2", "16"])]
    elif kind == "file":
        data, expected = draw_bytes(draw)
        file.write_bytes(data)
        with suppress(UsageError):  # read as training reads it, which may be as windows-1252
            text_file(file)
            expected = [{}]
        words += ["--prompt-file", str(file)]
    elif kind == "pipe":
        piped, expected = draw_bytes(draw)
    elif kind == "word":
        words += ["--prompt", draw_text(draw)]
        expected = [{}]
    else:
        words += [draw.choice(["--prompts", "--prompt-file"]), str(draw.choice([folder / "none", folder]))]
    if kind != "many" and draw.random() < 0.3:
        words += ["--save-state", str(folder / "text.state")]
    return Drawn([*words, "--json"], piped, expected)


@contextmanager
def standard_streams(piped: bytes | None) -> Iterator[tuple[io.BytesIO, io.StringIO]]:
    """Replace standard input, and output and error, which are yielded."""
    out, errors, before = io.BytesIO(), io.StringIO(), sys.stdin
    sys.stdin = io.TextIOWrapper(io.BytesIO(piped or b""))
    stdout = io.TextIOWrapper(out, encoding="utf-8", errors="replace")  # as the program sets it
    try:
        with redirect_stdout(stdout), redirect_stderr(errors):
            yield out, errors
    finally:
        sys.stdin = before
        stdout.flush()
        stdout.detach()


def fuzz(number: int, loaded: TrainedLanguageModel, folder: Path) -> tuple[str, list[str]]:
    """Return what the command did with the prompts of a number, and what is wrong with it."""
    drawn = draw_call(random.Random(number), loaded.checkpoint, folder)
    state = folder / "text.state"
    state.unlink(missing_ok=True)
    with standard_streams(drawn.piped) as (out, errors):
        code = _run(drawn.words)
    said, what = errors.getvalue(), "written" if code == 0 else "refused"
    if drawn.expected is None:
        refused = code == 2 and said.startswith(("error: ", "Usage: ")) and not out.getvalue()
        return what, [] if refused else [f"not refused: {code}, {said}, {drawn}"]
    if code:
        return what, [f"refused: {code}, {said}, {drawn}"]
    wrong = []
    lines = [json.loads(line) for line in out.getvalue().decode().splitlines()]
    if [line | told for told, line in zip(drawn.expected, lines, strict=False)] != lines:
        wrong.append(f"other prompts: {lines}, {drawn}")
    if len(lines) != len(drawn.expected):
        wrong.append(f"{len(lines)} lines: {drawn}")
    if state.exists():
        wrong += examine_state(loaded, state, lines[0]["text"], drawn)
    return what, wrong


def examine_state(loaded: TrainedLanguageModel, state: Path, text: str, drawn: Drawn) -> list[str]:
    """Return what is wrong with the state after a text."""
    session = loaded.load_state(state)
    read = loaded.tokenizer.decode_bytes(token for token in session.recent[0].tolist() if token >= 0)
    whole = (read + session.unread.row(0).pending).decode("utf-8", "replace")
    ends = whole.endswith(text.replace("\ud800", "\ufffd"))
    return [] if ends or "\ufffd" in text else [f"the state is of {whole[-200:]!r}, not {text!r}: {drawn}"]
