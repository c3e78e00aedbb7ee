"""`lmlong score` as its user meets it."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from inference.conftest import prose
from inference.conftest import run as run

import lmlong
from lmlong.cli.score import score
from lmlong.errors import UsageError
from lmlong.surprisal.records import LONGEST

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


def test_each_line_is_printed_as_the_library_scores_it(run: Path, book: Path) -> None:
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


def test_a_table_and_the_text_alone(run: Path, book: Path) -> None:
    head, *lines = scored(run, book, "--format", "tsv")[0].splitlines()
    expected = rows(scored(run, book)[0])
    assert head.split("\t") == list(expected[0])
    assert [line.split("\t")[5] for line in lines] == [str(row["bits"]) for row in expected]
    text, _ = scored(run, book, "--format", "text", "--text", "5000")
    assert text.rstrip("\n") == book.read_text().rstrip("\n")


def test_above_passes_only_what_stands_out(run: Path, book: Path) -> None:
    everything = rows(scored(run, book)[0])
    limit = sorted(row["z"] for row in everything if row["z"] is not None)[-4] - 1e-5  # which is rounded
    assert rows(scored(run, book, "--above", limit)[0]) == [
        row for row in everything if row["z"] is not None and row["z"] >= limit
    ]


def test_top_prints_the_units_with_the_highest_z_in_the_end(run: Path, book: Path) -> None:
    known = [row for row in rows(scored(run, book)[0]) if row["z"] is not None]
    best = sorted(known, key=lambda row: (-row["z"], row["number"]))
    assert rows(scored(run, book, "--top", 3)[0]) == best[:3]
    assert rows(scored(run, book, "--top", 10**6)[0]) == best
    above = [row for row in best if row["z"] >= best[1]["z"]]
    assert rows(scored(run, book, "--top", 5, "--above", best[1]["z"] - 1e-5)[0]) == above


def test_above_reports_the_highest_z_if_nothing_reaches_it(run: Path, book: Path) -> None:
    data = book.read_bytes() + "".join(f"{prose(6, number)}\n" for number in range(60)).encode()
    book.write_bytes(data)
    best = max((row for row in rows(scored(run, book)[0]) if row["z"] is not None), key=lambda row: row["z"])
    out, err = scored(run, book, "--above", 1000)
    line = f"no line has z of at least 1000; the highest is {best['z']:.4g}, of line {best['number']} of {book}"
    assert out == "" and err.splitlines()[-1] == line
    out, err = scored(run, book, "--above", best["z"] - 1e-5)
    assert rows(out) == [best] and "the highest" not in err
    out, err = scored(run, "--above", 8, piped=b"to be\nor not")
    assert out == "" and err.splitlines()[-1] == "no line has z of at least 8: the first 30 have none"
    out, err = scored(run, "--top", 8, piped=b"to be\nor not")
    assert out == "" and err.splitlines()[-1] == "no line has a z to compare: the first 30 have none"


def test_a_saved_state_continues_the_score(run: Path, tmp_path: Path) -> None:
    data, state = prose(500).encode(), tmp_path / "log.state"
    whole = rows(scored(run, piped=data)[0])
    first, _ = scored(run, "--save-state", state, piped=data[:1500])
    second, _ = scored(run, "--load-state", state, piped=data[1500:])
    found = rows(first) + rows(second)
    assert [row["offset"] for row in found] == [row["offset"] for row in whole]
    for name in ("bits", "mean"):
        assert [row[name] for row in found] == pytest.approx([row[name] for row in whole], rel=1e-4)
    assert [row["z"] is None for row in found] == [row["z"] is None for row in whole]
    with pytest.raises(UsageError, match="holds a score by line"):
        scored(run, "--load-state", state, "--by", "token", piped=data)
    model = lmlong.load(run, "cpu")
    model.save_state(model.read("to be "), state)
    (found,) = rows(scored(run, "--load-state", state, piped=b"or not")[0])
    assert found["offset"] == 0 and found["bytes"] == 6


RECORDS = ("--by", "record", "--field", "message")
LINES = [json.dumps({"message": prose(9, number)}) + "\n" for number in range(50)]


def test_records_are_lines_of_json_and_others_are_counted(run: Path) -> None:
    out, err = scored(run, *RECORDS, piped="".join(LINES[:9]).encode() + b"no json\n")
    assert [row["text"] for row in rows(out)] == [json.loads(line)["message"] for line in LINES[:9]]
    assert "skipped 1 records: not JSON" in err


def test_a_saved_score_of_records_continues_from_the_middle_of_a_line(run: Path, tmp_path: Path) -> None:
    data = "".join(LINES).encode()
    log, state = tmp_path / "app.jsonl", tmp_path / "log.state"
    log.write_bytes(data[:-100])
    found = rows(scored(run, *RECORDS, log, "--save-state", state)[0])
    log.write_bytes(data)  # it has grown
    found += rows(scored(run, *RECORDS, log, "--load-state", state)[0])
    assert found == rows(scored(run, *RECORDS, log)[0])
    assert state.stat().st_mode & 0o777 == 0o600 and not list(tmp_path.glob(".*"))


@pytest.mark.slow
def test_a_saved_score_holds_the_beginning_of_the_longest_record(run: Path, tmp_path: Path) -> None:
    state, by = tmp_path / "log.state", ("--by", "record")
    scored(run, *by, "--save-state", state, piped=b" " * (LONGEST + 1))
    _, err = scored(run, *by, "--load-state", state, piped=b"\n")
    assert f"skipped 1 records: longer than {LONGEST:,} bytes" in err


def test_a_saved_score_of_other_records_is_refused(run: Path, tmp_path: Path) -> None:
    state = tmp_path / "log.state"
    scored(run, *RECORDS, "--save-state", state, piped=b'{"message": "to be"}\n')
    with pytest.raises(UsageError, match=r"scored with --field message\. Give --field message"):
        scored(run, *RECORDS[:2], "--load-state", state)
    with pytest.raises(UsageError, match=r"holds a score by record\. Give --by record"):
        scored(run, "--load-state", state)
    model = lmlong.load(run, "cpu")
    model.save_state(model.read("to be "), state)
    with pytest.raises(UsageError, match="holds no score of records"):
        scored(run, *RECORDS, "--load-state", state)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--field", "x"), "--by record"),
        (("--save-state", "missing/s"), "folder is missing"),
        (("--follow",), "Name one"),
        (("nothing.txt",), "cannot be read"),
        (("--plot", "missing/x.png"), "folder is missing"),
        (("--plot", "x.txt"), "png"),
    ],
)
def test_a_mistake_is_a_usage_error(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=message):
        scored(run, *words)


def started(*words: object, **options: Any) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [*COMMAND, *map(str, words)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options
    )


def test_lines_are_printed_as_they_come_and_a_signal_saves_the_state_and_draws_the_plot(
    run: Path, tmp_path: Path
) -> None:
    """A process, for what ends it; a part of a line is printed once the log is quiet."""
    log, state, picture = tmp_path / "app.log", tmp_path / "log.state", tmp_path / "surprise.png"
    log.write_bytes(b"to be\nor not\n")
    with started(run, "--follow", log, "--save-state", state, "--plot", picture, "--quiet", "0.2") as process:
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


def test_a_log_that_has_grown_continues_where_it_ended(run: Path, tmp_path: Path) -> None:
    log, state = tmp_path / "app.log", tmp_path / "log.state"
    data = prose(120).encode()
    log.write_bytes(data[:301])
    first = rows(scored(run, log, "--save-state", state)[0])
    log.write_bytes(data)
    second = rows(scored(run, log, "--load-state", state, "--save-state", state)[0])
    last = rows(scored(run, log, "--load-state", state)[0])  # it has not grown: its last line ends nowhere
    whole = rows(scored(run, log)[0])
    assert [row["offset"] for row in first + second + last] == [row["offset"] for row in whole]
    assert [row["bits"] for row in first + second + last] == pytest.approx([row["bits"] for row in whole], rel=1e-4)
    log.write_bytes(b"to be\n")  # another one, which is read after it
    (other,) = rows(scored(run, log, "--load-state", state)[0])
    assert other["offset"] == last[0]["offset"] and other["bytes"] == last[0]["bytes"] + 6


def resident(pid: int) -> int:
    """Bytes of memory that a process has."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="there is no /proc")
def test_memory_is_flat_along_a_pipe(run: Path, tmp_path: Path) -> None:
    data = prose(2500).encode()  # one line of it ends nowhere
    piece = data.replace(b"\n", b" ") + data
    with started(run, "--above", "1000", "--threads", "1") as process:
        assert process.stdin
        after = []
        for round_number in range(11):
            process.stdin.write(piece)
            process.stdin.flush()
            if round_number >= 4:
                time.sleep(0.05)
                after.append(resident(process.pid))
        process.stdin.close()
        assert process.wait(120) == 0
    assert max(after) - after[0] < 5 << 20
