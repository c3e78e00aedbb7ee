"""`lmlong score` as its user meets it; and that every command reads a text as training does."""

import gzip
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from data.made_documents import docx
from inference.conftest import prose
from inference.conftest import run as run

import lmlong
from lmlong import recipe
from lmlong.attention.base import state_tensors
from lmlong.cli.generate import generate
from lmlong.cli.score import score
from lmlong.cli.state import state
from lmlong.cli.stop import Stop
from lmlong.data.document import Document
from lmlong.data.sources import open_source
from lmlong.errors import UsageError

COMMAND = [sys.executable, "-m", "lmlong", "score"]


def scored(*words: object, piped: bytes = b"") -> tuple[str, str]:
    """What the command writes to standard output and to standard error."""
    done = CliRunner().invoke(score, [str(word) for word in words], input=piped, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout_bytes.decode(), done.stderr


def rows(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


@pytest.fixture
def book(tmp_path: Path) -> Path:
    path = tmp_path / "book.txt"
    path.write_bytes(prose(400).encode())
    return path


def test_lines_are_those_of_the_library(run: Path, book: Path) -> None:
    out, err = scored(run, book)
    expected = list(lmlong.score(lmlong.load(run, "cpu"), book.read_text()))
    found = rows(out)
    assert [row["text"] for row in found] == [each.text for each in expected]
    assert [row["bits"] for row in found] == pytest.approx([each.bits for each in expected], abs=1e-5)
    assert [row["z"] is None for row in found] == [each.z is None for each in expected]
    assert {row["source"] for row in found} == {str(book)}
    assert err.startswith(f"{book.stat().st_size:,} bytes, ") and err.endswith(", precision 32\n")
    piped, _ = scored(run, piped=book.read_bytes())
    assert [row | {"source": str(book)} for row in rows(piped)] == found


def test_table_and_text_formats(run: Path, book: Path) -> None:
    head, *lines = scored(run, book, "--format", "tsv")[0].splitlines()
    expected = rows(scored(run, book)[0])
    assert head.split("\t") == list(expected[0])
    assert [line.split("\t")[5] for line in lines] == [str(row["bits"]) for row in expected]
    text, _ = scored(run, book, "--format", "text", "--text", "5000")
    assert text.rstrip("\n") == book.read_text().rstrip("\n")


def test_above_and_top_print_unusual_lines(run: Path, book: Path) -> None:
    known = [row for row in rows(scored(run, book)[0]) if row["z"] is not None]
    best = sorted(known, key=lambda row: (-row["z"], row["number"]))
    limit = best[3]["z"] - 1e-5  # which is rounded
    above = [row for row in known if row["z"] >= limit]
    assert rows(scored(run, book, "--above", limit)[0]) == above and len(above) >= 4
    assert rows(scored(run, book, "--top", 3)[0]) == best[:3]
    assert rows(scored(run, book, "--top", 10**6)[0]) == best
    assert rows(scored(run, book, "--top", 9, "--above", limit)[0]) == [row for row in best if row in above]

    out, err = scored(run, book, "--above", 1000)
    line = f"no line has z of at least 1000; the highest is {best[0]['z']:.4g}, of line {best[0]['number']} of {book}"
    assert (out, err.splitlines()[-1]) == ("", line)
    assert "the highest" not in scored(run, book, "--above", limit)[1]
    for words, line in (
        (("--above", 8), "no line has z of at least 8: the first 30 have none"),
        (("--top", 8), "no line has a z to compare: the first 30 have none"),
    ):
        out, err = scored(run, *words, piped=b"to be\nor not")
        assert (out, err.splitlines()[-1]) == ("", line)


RECORDS = ("--by", "record", "--field", "message")
LINES = "".join(json.dumps({"message": prose(9, number)}) + "\n" for number in range(50))


def test_records_are_lines_of_json_and_other_lines_are_counted(run: Path) -> None:
    lines = LINES.splitlines()[:9]
    out, err = scored(run, *RECORDS, piped="\n".join([*lines, "no json\n"]).encode())
    assert [row["text"] for row in rows(out)] == [json.loads(line)["message"] for line in lines]
    assert "skipped 1 records: not JSON" in err


@pytest.mark.parametrize(
    ("options", "text", "cut"), [((), prose(120), 301), (RECORDS, LINES, -100)], ids=["log", "records"]
)
def test_saved_state_continues_the_score(
    run: Path, tmp_path: Path, options: tuple[str, ...], text: str, cut: int
) -> None:
    """From the middle of a line; a log that has grown is read from where its reading ended."""
    data, log, state = text.encode(), tmp_path / "app.log", tmp_path / "log.state"

    def part(end: int | None, *words: object) -> list[dict[str, Any]]:
        log.write_bytes(data[:end])
        return rows(scored(run, *options, log, *words)[0])

    found = part(cut, "--save-state", state) + part(None, "--load-state", state, "--save-state", state)
    found += part(None, "--load-state", state)  # it has not grown since: its last line ends nowhere
    whole = part(None)
    for name in ("offset", "bytes", "bits", "mean"):
        assert [row[name] for row in found] == pytest.approx([row[name] for row in whole], rel=1e-4)
    assert [row["z"] is None for row in found] == [row["z"] is None for row in whole]
    assert state.stat().st_mode & 0o777 == 0o600 and not list(tmp_path.glob(".*"))


def test_another_file_than_the_saved_one_is_read_from_its_beginning(run: Path, tmp_path: Path) -> None:
    log, state = tmp_path / "app.log", tmp_path / "log.state"
    log.write_bytes(b"to be\nor not")
    scored(run, log, "--save-state", state)
    log.write_bytes(b"to be\n")
    (other,) = rows(scored(run, log, "--load-state", state)[0])
    assert (other["offset"], other["bytes"]) == (6, 12)


def test_saved_score_of_other_units_is_refused(run: Path, tmp_path: Path) -> None:
    lines, records, text = (tmp_path / f"{name}.state" for name in ("lines", "records", "text"))
    scored(run, "--save-state", lines, piped=b"to be\n")
    scored(run, *RECORDS, "--save-state", records, piped=b'{"message": "to be"}\n')
    model = lmlong.load(run, "cpu")
    model.save_state(model.read("to be "), text)
    for words, message in (
        (("--by", "token", "--load-state", lines), "holds a score by line"),
        (("--load-state", records), r"holds a score by record\. Give --by record"),
        ((*RECORDS[:2], "--load-state", records), r"scored with --field message\. Give --field message"),
        ((*RECORDS, "--load-state", text), "holds no score of records"),
    ):
        with pytest.raises(UsageError, match=message):
            scored(run, *words)
    (found,) = rows(scored(run, "--load-state", text, piped=b"or not")[0])
    assert found["offset"] == 0 and found["bytes"] == 6


def test_signal_saves_the_state_and_draws_the_plot(run: Path, tmp_path: Path) -> None:
    """A process, for what ends it; a part of a line is printed once the log is quiet."""
    log, state, picture = tmp_path / "app.log", tmp_path / "log.state", tmp_path / "surprise.png"
    log.write_bytes(b"to be\nor not\n")
    words = [*COMMAND, run, "--follow", log, "--save-state", state, "--plot", picture, "--quiet", "0.2"]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as process:
        assert process.stdout
        for line in ("to be\n", "or not\n"):
            assert json.loads(process.stdout.readline())["text"] == line
        with log.open("ab") as file:
            file.write(b"to be or\n")
        assert json.loads(process.stdout.readline())["text"] == "to be or\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
    assert picture.stat().st_size > 10_000
    (found,) = rows(scored(run, "--load-state", state, piped=b"not\n")[0])
    assert (found["number"], found["offset"], found["text"]) == (4, 22, "not\n")


def test_second_signal_ends_at_once() -> None:
    with Stop() as stop:
        assert list(stop.until(iter([b"some", b"text"]))) == [b"some", b"text"]
        with pytest.raises(InterruptedError), stop.waiting():
            signal.raise_signal(signal.SIGTERM)
        assert stop.received == signal.SIGTERM
        assert list(stop.until(iter([b"more"]))) == []
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


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


def test_bfloat16_reading_keeps_states_in_full_precision(run: Path) -> None:
    states, loaded = {}, lmlong.load(run)
    for precision in ("32", "bf16"):
        states[precision] = list(state_tensors(loaded.read(PROSE * 9, precision=precision).state))
    pairs = [pair for pair in zip(states["32"], states["bf16"], strict=True) if pair[0].is_floating_point()]
    assert all(half.dtype == full.dtype for full, half in pairs)
    errors = [float((full - half).norm() / full.norm().clamp(min=1)) for full, half in pairs]
    assert 0 < max(errors) < 0.05


def test_binary_stream_is_refused(run: Path) -> None:
    with pytest.raises(UsageError, match="standard input: byte 4 is NUL"):
        CliRunner().invoke(score, [str(run)], input=b"PK\3\4\0\0", catch_exceptions=False)
    holes = b"a line\n" * 2000 + bytes(100) + b"\nthe end\n"  # of a log that was cut while it was written
    done = CliRunner().invoke(score, [str(run)], input=holes, catch_exceptions=False)
    assert done.exit_code == 0 and "the end" in done.stdout
