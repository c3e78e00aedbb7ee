"""Token files whose digests are right and whose numbers are not: each is refused by name, and none is read."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from lmlong import recipe
from lmlong.data import token_encoding
from lmlong.data.token_dataset import FORMAT, prepare
from lmlong.data.token_file_writer import TokenFileWriter
from lmlong.errors import UsageError
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
def test_numbers_out_of_range(text: recipe.Text, name: str, dtype: str, change: Change, complaint: str) -> None:
    folder = prepare(text).folder
    numbers = np.fromfile(folder / name, dtype)
    rewritten(folder, name, change(numbers).astype(dtype).tobytes())
    with pytest.raises(UsageError, match=rf"\.tokens: damaged, .*{complaint}.*Delete its folder"):
        prepare(text)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"sources": 3}', '{"sources": []}', '{"sources": [{"name": 1}]}'])
def test_notes_that_are_none(text: recipe.Text, content: str) -> None:
    folder = prepare(text).folder
    rewritten(folder, "info.json", content.encode())
    with pytest.raises(UsageError, match=r"info\.json: damaged"):
        prepare(text)


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
