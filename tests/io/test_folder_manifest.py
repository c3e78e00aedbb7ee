"""A sealed folder: every bit of it is watched, its manifest included."""

import random
from pathlib import Path

import pytest

from lmlong.io import folder_manifest
from lmlong.io.files import with_checksum
from lmlong.io.folder_manifest import DamagedFolder, Format

FORMAT = Format("thing", 3)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "data").write_bytes(random.Random(0).randbytes(3000))
    (tmp_path / "words").write_text("some words\n")
    folder_manifest.seal(tmp_path, FORMAT, {"validation": 1.25, "step": 7})
    return tmp_path


def test_manifest_is_read_back(folder: Path) -> None:
    found = folder_manifest.verify(folder, FORMAT)
    assert sorted(found.files) == ["data", "words"] and found.about == {"validation": 1.25, "step": 7}


def test_every_byte_counts(folder: Path) -> None:
    for name, places in ((folder_manifest.NAME, range(10_000)), ("data", [1500])):
        whole = (folder / name).read_bytes()
        for at in places[: len(whole)]:
            (folder / name).write_bytes(whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :])
            with pytest.raises(DamagedFolder, match=name):
                folder_manifest.verify(folder, FORMAT)
        if name == "data":
            folder_manifest.verify(folder, FORMAT, ["words"])
        (folder / name).write_bytes(whole)
    folder_manifest.verify(folder, FORMAT)


@pytest.mark.parametrize(
    ("form", "words"),
    [
        (Format("thing", 4), r"format 4 is of a newer lmlong, this one reads 3\. Update"),
        (Format("thing", 2), "by an older lmlong"),
        (Format("other", 3), "damaged"),
    ],
)
def test_another_version_or_kind_is_refused(folder: Path, form: Format, words: str) -> None:
    (folder / folder_manifest.NAME).write_text(folder_manifest.manifest_text(folder, form, {}))
    with pytest.raises(DamagedFolder, match=words):
        folder_manifest.verify(folder, FORMAT)


SOUND = {"bytes": 1, "sha256": ""}


@pytest.mark.parametrize(
    "files",
    [
        *({"data": entry} for entry in ({}, {**SOUND, "bytes": True}, {**SOUND, "sha256": 2}, {**SOUND, "bytes": 1.0})),
        *({"data": []}, {"data": None}),
        *({name: SOUND} for name in ("../outside", "/etc/passwd", "..", folder_manifest.NAME)),
        [],
    ],
)
def test_signed_manifest_with_invalid_entry_is_refused(folder: Path, files: object) -> None:
    content = {"lmlong": "thing", "format": 3, "files": files}
    (folder / folder_manifest.NAME).write_text(with_checksum(content))
    with pytest.raises(DamagedFolder, match="damaged"):
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
