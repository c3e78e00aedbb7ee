"""The progress of reading a text is told off a terminal too, and what was done before counts as done, not as fast."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from lmlong import recipe
from lmlong.data import progress
from lmlong.data.progress import Progress
from lmlong.data.token_dataset import prepare

from .conftest import sentences
from .small_batches import small_batches

TextOf = Callable[..., recipe.Text]


def told(capsys: pytest.CaptureFixture[str], name: str) -> list[str]:
    return [line for line in capsys.readouterr().err.splitlines() if line.startswith(f"{name}: ")]


def test_share_speed_and_time_left_are_told(
    text_of: TextOf, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "LINE_INTERVAL", 0.0)
    with small_batches():
        prepare(text_of(sentences(30)), processes=1)
    lines = told(capsys, "tokens")
    shares = [int(re.fullmatch(r"tokens: (\d+)% of 0\.1 MB, [\d.]+ MB/s, [\d:]+ left", line)[1]) for line in lines]
    assert shares == sorted(shares) and len(shares) > 5 and shares[-1] == 100
    assert all(len(line) <= 80 for line in lines)


def test_a_short_text_is_read_without_a_word(text_of: TextOf, capsys: pytest.CaptureFixture[str]) -> None:
    prepare(text_of(sentences(30)))
    assert capsys.readouterr().err == ""


def test_the_sample_for_the_tokenizer_is_told_too(
    text_of: TextOf, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "LINE_INTERVAL", 0.0)
    prepare(text_of(sentences(30), tokenizer={"vocabulary": 300}))
    assert re.search(r"^sample for the tokenizer: \d+% of 0\.1 MB, ", capsys.readouterr().err, re.MULTILINE)


def test_without_a_total_the_bytes_are_told(tmp_path: Path) -> None:
    with Progress("tokens", None) as bar:
        bar.update(2_500_000)
        assert re.fullmatch(r"tokens: 2\.5 MB, [\d,.]+ MB/s", bar.line())


def test_what_was_done_before_is_not_fast(text_of: TextOf) -> None:
    with Progress("tokens", 4_000_000_000) as bar:
        bar.skip(3_000_000_000)
        found = re.fullmatch(r"tokens: 75% of 4,000\.0 MB, 0\.0 MB/s, .* left", bar.line())
        assert found
