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


@pytest.mark.parametrize("text", ["", "GB", "-3GB", "24 TB", "nanGB", "infGB", "1e99GB", "24GBB", "9999999999g", "0"])
def test_invalid_size_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter, match=r"is not (a size in bytes|between 1 bytes and)"):
        options.ByteSize(1).convert(text, None, None)


def test_number_of_tokens_may_be_unlimited() -> None:
    limit = options.TokenCount(0, or_unlimited=True)
    assert limit.convert("unlimited", None, None) is None
    assert limit.convert("4k", None, None) == options.TokenCount(1).convert("4k", None, None) == 4096
    for kind, text in (
        (limit, "-1"),
        (options.TokenCount(1), "unlimited"),
        (options.TokenCount(1), "4kb"),
    ):
        with pytest.raises(click.BadParameter, match=r"is less than 0|is not a number of tokens"):
            kind.convert(text, None, None)


def test_json_is_printed_or_written_to_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ("recipe", "options", "training.steps")
    printed, dash = invoke(*words, "--json"), invoke(*words, "--json", "-")
    assert printed.output == dash.output and json.loads(printed.output)[0]["key"] == "training.steps"
    written = invoke(*words, "--json", "steps.json")
    assert written.output == invoke(*words).output != printed.output
    assert json.loads(Path("steps.json").read_text()) == json.loads(printed.output)


def test_json_does_not_take_another_argument(tmp_path: Path) -> None:
    """A plain --json before the recipe would overwrite it."""
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("name: mine\n")
    for argument in (str(recipe), "quickstart"):
        result = invoke("data", "info", "--json", argument)
        assert result.exit_code == 2 and "does not end in .json" in result.output
    assert recipe.read_text() == "name: mine\n"
