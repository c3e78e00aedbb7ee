"""Token files whose digests are right and whose numbers are not: each is reported and written again; none is read."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lmlong import recipe
from lmlong.data import token_encoding
from lmlong.data.text_info import text_notes
from lmlong.data.token_dataset import FORMAT, prepare
from lmlong.data.token_file_writer import TokenFileWriter
from lmlong.data.tokenizers import training
from lmlong.io.cache import cache_folder
from lmlong.io.files import with_checksum
from lmlong.io.folder_manifest import NAME, seal

from .conftest import text_over

Change = Callable[[np.ndarray], np.ndarray]


@pytest.fixture
def text(tmp_path: Path) -> recipe.Text:
    """Three documents, and one to validate on."""
    for number in range(3):
        (tmp_path / f"{number}.txt").write_text(f"document {number} " * 20)
    (tmp_path / "held-out.md").write_text("another one " * 20)
    validation = {"sources": [{"kind": "files", "paths": [str(tmp_path / "*.md")]}]}
    return text_over(tmp_path / "*.txt", validation=validation)


def rewritten(folder: Path, name: str, content: bytes) -> None:
    """Replace a file of the cache, and sign the folder again."""
    (folder / name).write_bytes(content)
    (folder / NAME).unlink()
    seal(folder, FORMAT, {})


@pytest.mark.parametrize(
    ("name", "dtype", "change", "complaint"),
    [
        ("train-0.tokens", "<u2", lambda a: np.where(np.arange(len(a)) == 5, 60_000, a), "beyond the vocabulary"),
        ("validation.tokens", "<u2", lambda a: a + 300, "beyond the vocabulary"),
        ("train-0.tokens", "u1", lambda a: a[:-1], "not a multiple of a number"),
        ("train-0.starts", "u1", lambda a: a[:-1], "not a multiple of a number"),
        ("train-0.starts", "<i8", lambda a: a - 1, "do not increase from 0"),
        ("train-0.starts", "<i8", lambda a: a[::-1], "do not increase from 0"),
        ("train-0.starts", "<i8", lambda a: a * 0, "do not increase from 0"),
        ("train-0.starts", "<i8", lambda a: np.where(a == a[-1], 1 << 62, a), "are out of range"),
        ("train-0.starts", "<i8", lambda a: a[:0], "are out of range"),
        ("train-0.tokens", "<u2", lambda a: a[: len(a) // 3], "are out of range"),
    ],
)
def test_files_with_numbers_out_of_range_are_written_again(
    text: recipe.Text, capsys: pytest.CaptureFixture[str], name: str, dtype: str, change: Change, complaint: str
) -> None:
    folder = prepare(text).folder
    numbers = np.fromfile(folder / name, dtype)
    rewritten(folder, name, change(numbers).astype(dtype).tobytes())
    assert_rebuilt(text, capsys, rf"\.tokens: damaged, .*{complaint}.*")


def assert_rebuilt(text: recipe.Text, capsys: pytest.CaptureFixture[str], complaint: str) -> None:
    """Check that the folder of a text is reported in one line, and written again."""
    whole = [*text_notes(prepare(text).info)]
    line, *further = [line for line in capsys.readouterr().err.splitlines() if "damaged" in line]
    assert re.search(rf"{complaint} Rebuilding it\.$", line) and not further
    assert [*text_notes(prepare(text).info)] == whole and "damaged" not in capsys.readouterr().err


def without_overlap(info: Any) -> None:
    del info["overlap"]


def encodings_as_text(info: Any) -> None:
    info["sources"][0]["encodings"] = "latin-1"


def a_source_less(info: Any) -> None:
    info["sources"].pop()


def tokens_as_text(info: Any) -> None:
    info["sources"][0]["train"]["tokens"] = "7"


@pytest.mark.parametrize("change", [without_overlap, encodings_as_text, a_source_less, tokens_as_text])
def test_a_description_that_cannot_be_read_is_written_again(
    text: recipe.Text, capsys: pytest.CaptureFixture[str], change: Callable[[Any], None]
) -> None:
    folder = prepare(text).folder
    info = json.loads((folder / "info.json").read_text())
    change(info)
    rewritten(folder, "info.json", json.dumps(info).encode())
    assert_rebuilt(text, capsys, r"info\.json: damaged\.")


def test_an_unreadable_tokenizer_is_trained_again(text: recipe.Text, capsys: pytest.CaptureFixture[str]) -> None:
    trained = text.model_copy(update={"tokenizer": recipe.Tokenizer(vocabulary=300)})
    tokenizer = prepare(trained).tokenizer
    (folder,) = (cache_folder() / "tokenizers").iterdir()
    (folder / "tokenizer.model").write_bytes(b"noise")
    (folder / NAME).unlink()
    seal(folder, training.FORMAT, {})
    assert prepare(trained).tokenizer.hash == tokenizer.hash
    assert capsys.readouterr().err.count("Rebuilding it.") == 1


@pytest.mark.parametrize(
    "change", [{"batches": -1}, {"batches": "3"}, {"batches": 1.5}, {"size": 1 << 40}, {"size": -4}]
)
def test_progress_that_cannot_be_is_begun_again(tmp_path: Path, change: dict[str, object]) -> None:
    files = TokenFileWriter(tmp_path, {"train-0.tokens"})
    files.save()
    files.close()
    said = json.loads((tmp_path / "progress.json").read_text())
    del said["sha256"]
    (name, (size, digest)) = next(iter(said["files"].items()))
    said["files"][name] = [change.get("size", size), digest]
    said["batches"] = change.get("batches", 7)
    assert said["characters"] == token_encoding.BATCH
    (tmp_path / "progress.json").write_text(with_checksum(said))
    again = TokenFileWriter(tmp_path, {"train-0.tokens"})
    again.close()
    assert (again.batches, again.size) == (0, 0)
