"""What the fuzzer of commands complains of."""

from pathlib import Path
from random import Random

import pytest
from cli.override_draws import draw, prepare, run


def test_traceback_and_wrong_exit_code_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = prepare(tmp_path)
    sound = draw(Random(0), place / "book.txt")._replace(words=("recipe", "check"), overrides=())
    for error, complaint in ((ZeroDivisionError("planted"), "planted"), (SystemExit(77), "exit code 77")):

        def fail(*_: object, error: BaseException = error) -> None:
            raise error

        monkeypatch.setattr("lmlong.cli.recipe.load_recipe", fail)
        assert any(complaint in line for line in run(sound, place).complaints)
