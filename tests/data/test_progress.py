"""Without a terminal the progress is printed in lines; earlier work counts as done, but not for the speed."""

import re
from collections.abc import Callable

import pytest

from lmlong import recipe
from lmlong.data.token_dataset import prepare
from lmlong.report import progress

from .conftest import sentences
from .small_batches import small_batches

TextOf = Callable[..., recipe.Text]


def test_share_speed_and_time_left_are_shown(
    text_of: TextOf, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "FIRST", 0.0)
    monkeypatch.setattr(progress, "INTERVAL", 0.0)
    with small_batches():
        prepare(text_of(sentences(30), tokenizer={"vocabulary": 300}), processes=1)
    lines = capsys.readouterr().err.splitlines()
    assert any(line.startswith("sample for the tokenizer: ") for line in lines)
    pattern = r"tokens: (\d+)% of [\d.]+ [kM]B, [\d.]+ [kM]B/s, [\d:]+ left"
    shares = [int(match[1]) for match in map(re.compile(pattern).fullmatch, lines) if match]
    assert shares == sorted(shares) and len(shares) > 5 and shares[-1] == 100
    assert all(len(line) <= 80 for line in lines)


def test_a_short_text_is_read_without_a_word(text_of: TextOf, capsys: pytest.CaptureFixture[str]) -> None:
    prepare(text_of(sentences(30)))
    assert capsys.readouterr().err == ""
