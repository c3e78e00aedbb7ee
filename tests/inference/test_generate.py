"""`lmlong generate` as its user meets it."""

import io
import json
import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from machine import needs_native

from lmlong.cli import reading, writing
from lmlong.cli.generate import generate
from lmlong.cli.reading import many, pieces_of
from lmlong.errors import UsageError
from lmlong.inference.loading import load
from lmlong.model.state_size import state_size
from lmlong.report import progress

COMMAND = [sys.executable, "-m", "lmlong", "generate"]
BUFFERED = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
ENDLESS = ["--max-tokens", "unlimited", "--no-fast-decode", "--temperature", "0", "--device", "cpu"]


def written(*words: object, piped: bytes = b"") -> str:
    """What the command writes to standard output, which must be all it writes."""
    done = CliRunner().invoke(generate, [str(word) for word in words], input=piped, catch_exceptions=False)
    assert (done.exit_code, done.stderr) == (0, "")
    return done.stdout_bytes.decode("utf-8", "surrogatepass")  # a random model writes any bytes


def test_only_the_new_text_is_printed_wherever_the_prompt_comes_from(run: Path) -> None:
    prompt = "naïve\r\n"
    expected = "".join(load(run, "cpu").stream(prompt, max_tokens=30, seed=5))
    options = [run, "--max-tokens", 30, "--seed", 5]
    assert written(*options, "--prompt", prompt) == expected
    assert written(*options, piped=prompt.encode()) == expected


def test_every_option_reaches_the_stream(run: Path) -> None:
    options = {"temperature": 1.3, "top_k": 90, "top_p": 0.9, "seed": 4, "max_tokens": 60}
    words = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    loaded = load(run, "cpu")
    whole = "".join(loaded.stream("a", **options))
    assert written(run, "--prompt", "a", *words) == whole
    assert written(run, "--prompt", "a", *words, "--stop", whole[9], "--stop", "zz") == whole[: whole.index(whole[9])]
    endless = "".join(loaded.stream("a", **options, ignore_eos=True))
    assert written(run, "--prompt", "a", *words, "--ignore-eos") == endless


def test_text_comes_as_it_is_written_and_an_interrupt_ends_it_in_silence(run: Path) -> None:
    words = [*COMMAND, str(run), "--prompt", "a", *ENDLESS]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=BUFFERED)
    assert process.stdout
    try:
        assert 0 < len(os.read(process.stdout.fileno(), 1 << 16)) < 8192  # which a buffer would have held back
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
        assert (process.returncode, errors) == (130, b"")
    finally:
        process.kill()  # or it would write for ever


def test_a_terminal_shows_the_prompt_dimmed_before_the_text_and_a_last_newline(run: Path) -> None:
    text = "".join(load(run, "cpu").stream("ab" * 2000, max_tokens=5, temperature=0))
    ours, its = pty.openpty()
    words = [*COMMAND, str(run), "--prompt", "ab" * 2000, "--max-tokens", "5", "--temperature", "0"]
    done = subprocess.run([*words, "--device", "cpu"], stdin=its, stdout=its, stderr=subprocess.PIPE, timeout=60)
    assert (done.returncode, done.stderr) == (0, b"")
    shown = os.read(ours, 1 << 16).decode()
    assert shown == f"\x1b[2m…{'ab' * 500}\x1b[0m{text}\n".replace("\n", "\r\n")


def test_samples_of_one_prompt(run: Path) -> None:
    lines = written(run, "--prompt", "a", "--max-tokens", 20, "--samples", 3, "--seed", 5, "--json").splitlines()
    told = [json.loads(line) for line in lines]
    assert [line["sample"] for line in told] == [0, 1, 2]
    assert len({line["text"] for line in told}) == 3 and {line["seed"] for line in told} == {5}
    loaded = load(run, "cpu")
    assert told[0]["text"] == "".join(loaded.stream("a", max_tokens=20, seed=5))
    for line in told:
        assert loaded.tokenizer.decode(line["tokens"]) == line["text"] and line["end"] == "max_tokens"
        assert len(line["log_probabilities"]) == len(line["tokens"]) == 20
        assert all(value < 0 for value in line["log_probabilities"])
    words = [str(run), "--prompt", "a", "--max-tokens", "20", "--samples", "3", "--seed", "5"]
    done = CliRunner().invoke(generate, words)
    assert done.stdout == "".join(line["text"] + "\n" for line in told)
    assert done.stderr.splitlines() == [f"--- prompt 1, sample {number}" for number in (1, 2, 3)]


@pytest.mark.parametrize("batch", [1, 2])
def test_many_prompts_are_answered_in_order_with_the_values_of_their_lines(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batch: int
) -> None:
    monkeypatch.setattr(writing, "BATCH", batch)
    file = tmp_path / "prompts.jsonl"
    file.write_text('"to be"\n\n{"prompt": "or not", "id": 7}\n{"prompt": ""}\n')
    lines = written(run, "--prompts", file, "--max-tokens", 9, "--temperature", 0, "--json")
    told = [json.loads(line) for line in lines.splitlines()]
    assert [(line["prompt"], line.get("id")) for line in told] == [("to be", None), ("or not", 7), ("", None)]
    loaded = load(run, "cpu")
    assert [line["text"] for line in told] == [
        "".join(loaded.stream(line["prompt"], max_tokens=9, temperature=0)) for line in told
    ]


TEXTS = ["a word ", "naïve 😀\n", "\u2028\u2029\x85", "\ufeff", "\0", "\r\n", "\x1b[31m", '"', "\\", "é" * 500, ""]
LINES = [json.dumps(text, ensure_ascii=ascii) for text in TEXTS for ascii in (True, False)]
LINES += [json.dumps({"id": [7], "prompt": text}) for text in TEXTS]
BROKEN = ["{", "7", "null", "[]", '["a"]', '{"prompt": 7}', "{}", "a word", '"a', '"a" "b"', "'a'", '"\ud800"']


@pytest.mark.parametrize("newline", ["\n", "\r\n", "\n\n", "\n \t\n"])
def test_each_line_of_a_file_of_prompts_is_one_or_is_refused(tmp_path: Path, newline: str) -> None:
    file = tmp_path / "prompts.jsonl"
    for begin, end in (("", ""), ("\ufeff", newline)):
        file.write_bytes((begin + newline.join(LINES) + end).encode())
        assert [prompt.text for prompt in many(file)] == [text for text in TEXTS for _ in range(2)] + TEXTS
    for line in BROKEN:
        file.write_bytes(newline.join([LINES[0], line, LINES[1]]).encode("utf-8", "surrogatepass"))
        with pytest.raises(UsageError, match=r"prompts\.jsonl"):
            many(file)


@pytest.mark.parametrize("fast", [pytest.param(True, marks=needs_native), False])
def test_statistics_go_to_standard_error(run: Path, fast: bool) -> None:
    words = [str(run), "--device", "cpu", "--prompt", "abc", "--max-tokens", "7", "--stats"]
    done = CliRunner().invoke(generate, [*words, *([] if fast else ["--no-fast-decode"])])
    seed = int(done.stderr.split()[-1])
    assert done.stdout == "".join(load(run, "cpu").stream("abc", max_tokens=7, seed=seed))
    size = state_size(load(run, "cpu").model).empty.bytes
    pattern = rf"prompt 4 tokens in .* tokens/s\); written 7 tokens in .* tokens/s\); state {size:,} bytes a text; "
    decoder = r"native code, \w+ .*?" if fast else "torch"
    pattern += rf"decoded by {decoder}; (drafts \d+ of \d+ tokens accepted .*|no drafts tried); "
    assert re.fullmatch(pattern + r"seed \d+\n", done.stderr)
    again = CliRunner().invoke(generate, [str(run), "--prompt", "", "--max-tokens", "1", "--stats"])
    assert "prompt 1 token in" in again.stderr and "written 1 token in" in again.stderr
    assert again.stderr.split()[-1] != str(seed), "another is drawn"


def test_a_text_of_any_size_is_read_in_pieces(run: Path) -> None:
    text = "naïve 😀 " * 100_000
    pieces = list(pieces_of(io.BytesIO(text.encode()), "book"))
    assert len(pieces) == 2 and "".join(pieces) == text
    data = text.encode() + b"\xff" + b"more"
    with pytest.raises(UsageError, match=f"book: not UTF-8 at byte {len(text.encode())}"):
        list(pieces_of(io.BytesIO(data), "book"))
    with pytest.raises(UsageError, match="book: not UTF-8 at byte 1"):
        list(pieces_of(io.BytesIO("aé".encode()[:2]), "book"))
    with pytest.raises(UsageError, match="standard input: not UTF-8 at byte 2"):
        CliRunner().invoke(generate, [str(run)], input="naïve".encode("latin-1"), catch_exceptions=False)


@pytest.mark.parametrize(("size", "shown"), [(None, "1.0 MB, 0.5 MB/s"), (4_000_000, "25% of 4.0 MB, 0.5 MB/s")])
def test_progress_of_reading_counts_bytes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], size: int | None, shown: str
) -> None:
    now = [0.0]
    monkeypatch.setattr(progress, "FIRST", 2.0)
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    text = reading.with_progress(iter(["é" * 500_000] * 2), "pipe", size)
    for now[0] in (0.0, 2.0):
        next(text, None)
    output, errors = capsys.readouterr()
    assert output == "" and errors.startswith(f"reading pipe: {shown}")
