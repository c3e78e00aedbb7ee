"""Drawn and crafted files are used or refused; `tools/fuzz.py` tries more of them."""

from pathlib import Path

import pytest
from crafted import FORMATS, try_crafted
from data import tokenizer_draws


@pytest.mark.parametrize("name", FORMATS)
def test_crafted_file_is_used_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("LMLONG_CACHE", str(tmp_path / "cache"))
    form = FORMATS[name]
    prepared = form.prepare(tmp_path)
    tried = {number: try_crafted(number, form, prepared) for number in range(form.usual)}
    assert {number: complaints for number, (_, complaints) in tried.items() if complaints} == {}
    assert {outcome for outcome, _ in tried.values()} >= form.outcomes


def test_drawn_tokenizer_loses_nothing_or_is_refused() -> None:
    drawn = {number: tokenizer_draws.fuzz(number) for number in range(30)}
    assert {number: complaints for number, (_, complaints) in drawn.items() if complaints} == {}
    assert {outcome for outcome, _ in drawn.values()} == {"refused", "trained", "loaded"}
