"""A sealed folder: every bit of it is watched, its manifest included."""

import json
import random
from pathlib import Path

import pytest

from lmlong.io import folder_manifest
from lmlong.io.files import with_checksum
from lmlong.io.folder_manifest import DamagedFolder, Format

FORMAT = Format("thing", 3)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    sealed = tmp_path / "sealed"
    sealed.mkdir()
    (sealed / "data").write_bytes(random.Random(0).randbytes(3000))
    (sealed / "words").write_text("some words\n")
    folder_manifest.seal(sealed, FORMAT, {"validation": 1.25, "step": 7})
    return sealed


def test_manifest_is_read_back(folder: Path) -> None:
    found = folder_manifest.verify(folder, FORMAT)
    assert sorted(found.files) == ["data", "words"] and found.about == {"validation": 1.25, "step": 7}


def test_every_byte_of_the_manifest_counts(folder: Path) -> None:
    path = folder / folder_manifest.NAME
    whole = path.read_bytes()
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :])
        with pytest.raises(DamagedFolder):
            folder_manifest.verify(folder, FORMAT)
    path.write_bytes(whole)
    folder_manifest.verify(folder, FORMAT)


def test_changed_bit_of_a_file_is_found(folder: Path) -> None:
    data = bytearray((folder / "data").read_bytes())
    data[1500] ^= 1
    (folder / "data").write_bytes(data)
    with pytest.raises(DamagedFolder, match="data"):
        folder_manifest.verify(folder, FORMAT)
    folder_manifest.verify(folder, FORMAT, ["words"])


@pytest.mark.parametrize(
    ("version", "words"), [(4, r"format 4 is of a newer lmlong, this one reads 3\. Update"), (2, "by an older lmlong")]
)
def test_another_version_is_refused(folder: Path, version: int, words: str) -> None:
    folder_manifest.seal(folder, Format("thing", version), {})
    with pytest.raises(DamagedFolder, match=words):
        folder_manifest.verify(folder, FORMAT)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "3", "null", "{}", '{"format": 3}', "[" * 100_000, '{"files": ' * 90_000, '{"format": true}',
     '{"format": 3, "files": [], "sha256": ""}', "\x00", '{"format": NaN, "sha256": 1, "files": {}}'],
)  # fmt: skip
def test_invalid_manifest_is_refused(folder: Path, text: str) -> None:
    (folder / folder_manifest.NAME).write_text(text)
    with pytest.raises(DamagedFolder):
        folder_manifest.verify(folder, FORMAT)


@pytest.mark.parametrize(
    "entry",
    [{}, {"bytes": True, "sha256": ""}, {"bytes": 1, "sha256": 2}, {"bytes": 1.0, "sha256": ""}, [], None],
)
def test_signed_manifest_with_invalid_entry_is_refused(folder: Path, entry: object) -> None:
    content = {"lmlong": "thing", "format": 3, "files": {"data": entry}}
    (folder / folder_manifest.NAME).write_text(with_checksum(content))
    with pytest.raises(DamagedFolder, match="damaged"):
        folder_manifest.verify(folder, FORMAT)


def test_folder_of_another_kind_is_refused(folder: Path) -> None:
    with pytest.raises(DamagedFolder, match="damaged"):
        folder_manifest.verify(folder, Format("other", 3))
    assert json.loads((folder / folder_manifest.NAME).read_text())["lmlong"] == "thing"
