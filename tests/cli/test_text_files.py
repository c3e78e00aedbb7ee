"""Every command that reads a text reads it as training does, and refuses what holds none."""

import gzip
import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from data.made_documents import docx, html, zipped
from inference.conftest import run as run

import lmlong
from lmlong import recipe
from lmlong.attention.base import state_tensors
from lmlong.cli.generate import generate
from lmlong.cli.score import score
from lmlong.cli.state import state
from lmlong.data.document import Document
from lmlong.data.sources import open_source
from lmlong.errors import UsageError

PROSE = "To be, or not to be: naïve Bären.\n" * 5
FILES = {
    "a.docx": docx,
    "a.txt.gz": lambda: gzip.compress(PROSE.encode()),
    "western.txt": lambda: PROSE.encode("windows-1252"),
    "plain.log": lambda: PROSE.encode(),
}


def trained_on(path: Path) -> str:
    """The text of a file as a recipe reads it."""
    (document,) = open_source(recipe.Files(kind="files", paths=[str(path)]), "strict").documents()
    assert isinstance(document, Document)
    return "".join(document.pieces())


@pytest.mark.parametrize("name", FILES)
def test_file_is_read_as_in_training(run: Path, tmp_path: Path, name: str) -> None:
    file, saved = tmp_path / name, tmp_path / "a.state"
    file.write_bytes(FILES[name]())
    text = trained_on(file)

    def call(command: object, *words: object) -> str:
        done = CliRunner().invoke(command, list(map(str, words)), catch_exceptions=False)  # type: ignore[arg-type]
        assert done.exit_code == 0, done.output
        return done.stdout_bytes.decode()

    lines = [json.loads(line) for line in call(score, run, file, "--text", "9999").splitlines()]
    assert "".join(line["text"] for line in lines) == text
    options = ("--temperature", 0, "--max-tokens", 5, "--json")
    asked = [json.loads(call(generate, run, "--prompt", text, *options))]
    call(state, "build", run, file, "-o", saved)
    asked.append(json.loads(call(generate, run, "--load-state", saved, "--prompt", "", *options)))
    assert len({str(each["tokens"]) for each in asked}) == 1


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.png", b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", "byte 8 is NUL"),
        ("a.txt", zipped({"a": b"x"}), "is NUL"),
        ("a.zip", zipped({"a.txt": b"x"}), "holds several texts"),
        ("a.doc", b"x", "save it as .docx"),
        ("a.gz", b"x", "damaged"),
    ],
)
def test_file_without_text_is_refused(run: Path, tmp_path: Path, name: str, data: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(UsageError, match=rf"{name}: .*{message}"):
        CliRunner().invoke(score, [str(run), str(tmp_path / name)], catch_exceptions=False)
    if "NUL" not in message:
        with pytest.raises(UsageError, match=rf"{name}: .*{message}"):
            CliRunner().invoke(
                state, ["build", str(run), str(tmp_path / name), "-o", str(tmp_path / "s")], catch_exceptions=False
            )


def test_bfloat16_reading_keeps_states_in_full_precision(run: Path) -> None:
    states, loaded = {}, lmlong.load(run)
    for precision in ("32", "bf16"):
        states[precision] = list(state_tensors(loaded.read(PROSE * 9, precision=precision).state))
    pairs = [pair for pair in zip(states["32"], states["bf16"], strict=True) if pair[0].is_floating_point()]
    assert all(half.dtype == full.dtype for full, half in pairs)
    errors = [float((full - half).norm() / full.norm().clamp(min=1)) for full, half in pairs]
    assert 0 < max(errors) < 0.05


def test_binary_stream_is_refused(run: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="standard input: byte 4 is NUL"):
        CliRunner().invoke(score, [str(run)], input=b"PK\3\4\0\0", catch_exceptions=False)
    holes = b"a line\n" * 2000 + bytes(100) + b"\nthe end\n"  # of a log that was cut while it was written
    done = CliRunner().invoke(score, [str(run)], input=holes, catch_exceptions=False)
    assert done.exit_code == 0 and "the end" in done.stdout


def test_converted_file_cannot_grow_and_address_is_not_read(run: Path, tmp_path: Path) -> None:
    (tmp_path / "a.html").write_bytes(html())
    for words in (["--follow"], ["--save-state", str(tmp_path / "s")]):
        with pytest.raises(UsageError, match=r"a\.html: is converted to text as a whole"):
            CliRunner().invoke(score, [str(run), str(tmp_path / "a.html"), *words], catch_exceptions=False)
    with pytest.raises(UsageError, match=r"https://a.org/b.txt: addresses are not read. Download the file"):
        CliRunner().invoke(score, [str(run), "https://a.org/b.txt"], catch_exceptions=False)
