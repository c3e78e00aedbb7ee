"""The types of the options that commands share."""

import json
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from lmlong.cli import options
from lmlong.cli.main import lmlong


def invoke(*words: str) -> Result:
    return CliRunner().invoke(lmlong, list(words))


@pytest.mark.parametrize(
    ("text", "size"),
    [
        *(("4096", 4096), ("0", 0), ("16m", 16 << 20), ("10g", 10 << 30), ("64k", 64 << 10)),
        *(("24GB", 24 * 10**9), ("800 MB", 8 * 10**8), ("1.5gib", 3 << 29), ("64kb", 64_000)),
    ],
)
def test_size_has_binary_and_decimal_units(text: str, size: int) -> None:
    assert options.ByteSize().convert(text, None, None) == size


@pytest.mark.parametrize(
    ("kind", "texts"),
    [
        (options.ByteSize(1), ["", "GB", "-3GB", "24 TB", "nanGB", "infGB", "1e99GB", "24GBB", "9999999999g", "0"]),
        (options.TokenCount(0, or_unlimited=True), ["-1"]),
        (options.TokenCount(1), ["unlimited", "4kb"]),
    ],
)
def test_what_is_no_size_is_refused(kind: click.ParamType, texts: list[str]) -> None:
    for text in texts:
        message = r"is not (a size in bytes|between 1 bytes and|a number of tokens)|is less than 0"
        with pytest.raises(click.BadParameter, match=message):
            kind.convert(text, None, None)


def test_number_of_tokens_may_be_unlimited() -> None:
    limit = options.TokenCount(0, or_unlimited=True)
    assert limit.convert("unlimited", None, None) is None
    assert limit.convert("4k", None, None) == options.TokenCount(1).convert("4k", None, None) == 4096


def test_json_is_printed_or_written_to_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ("recipe", "options", "training.steps")
    printed, dash = invoke(*words, "--json"), invoke(*words, "--json", "-")
    assert printed.output == dash.output and json.loads(printed.output)[0]["key"] == "training.steps"
    written = invoke(*words, "--json", "steps.json")
    assert written.output == invoke(*words).output != printed.output
    assert json.loads(Path("steps.json").read_text()) == json.loads(printed.output)


@pytest.mark.parametrize("command", ["train", "score", "eval", "serve", "bench", "state build"])
def test_threads_are_set_before_anything_else(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []
    monkeypatch.setattr("lmlong.native.threads.set_threads", counts.append)
    invoke(*command.split(), "--threads", "3")  # which all need arguments too
    assert counts == [3]
