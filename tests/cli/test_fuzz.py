"""Recipes and overrides drawn at random: never a traceback, the documented exit codes, a message that names the key.

What a number stands for, and many more of them: `tools/fuzz.py overrides --cases 1 --seed NUMBER`.
"""

from collections import Counter
from pathlib import Path

import pytest
from cli.override_draws import draw, run

USUAL = 60


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LMLONG_CACHE", str(tmp_path / "cache"))
    (tmp_path / "book.txt").write_text("once upon a time there was a book. " * 60)
    return tmp_path


def test_drawn_recipes_and_overrides_end_with_0_or_2(place: Path) -> None:
    outcomes = [run(draw(number, place / "book.txt"), place) for number in range(USUAL)]
    assert [found for found in outcomes if found.complaints] == []
    codes = Counter(found.code for found in outcomes)
    assert codes.keys() == {0, 2} and min(codes.values()) > USUAL // 10


def test_a_traceback_and_a_wrong_exit_code_are_found(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sound = draw(0, place / "book.txt")._replace(words=("recipe", "check"), overrides=())
    for error, complaint in ((ZeroDivisionError("planted"), "planted"), (SystemExit(77), "exit code 77")):

        def fail(*_: object, error: BaseException = error) -> None:
            raise error

        monkeypatch.setattr("lmlong.cli.recipe.load_recipe", fail)
        assert any(complaint in line for line in run(sound, place).complaints)
