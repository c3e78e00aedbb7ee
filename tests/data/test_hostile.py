"""Damaged and unusual texts: no byte is lost without being counted, and no file breaks the others."""

import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from lmlong.data.document import Document, Measure
from lmlong.data.token_dataset import TokenDataset, prepare
from lmlong.errors import UsageError

from .conftest import text_over

HOSTILE = {
    "nul.txt": b"a\0b\0" * 30,
    "bom.txt": b"\xef\xbb\xbftext after a mark",
    "utf16.txt": "sixteen".encode("utf-16"),
    "latin.txt": "fa\xe7ade".encode("latin-1"),
    "surrogate.txt": b"lone \xed\xa0\x80 surrogate",
    "overlong.txt": b"overlong \xc0\xaf slash",
    "beyond.txt": b"beyond \xf5\x80\x80\x80 the last",
    "cut.txt": "ends in the middle \u4e2d".encode()[:-1],
    "white.txt": b" \t\r\n\x0b\x0c" * 50,
    "newlines.txt": b"\n" * 100_000,
    "line.txt": b"x" * 1_000_000,
    "empty.txt": b"",
    "marks.txt": "\ufffd".encode() * 7,
}


def read(folder: Path, **options: object) -> TokenDataset:
    return prepare(text_over(folder, **{"errors": "replace", **options}))


def adds_up(tokens: TokenDataset, on_disk: int) -> None:
    """Bytes on disk = read + skipped; text = read - replaced + put in; tokens = text + bos and eos."""
    (source,) = tokens.info["sources"]
    found, splits = source["read"], [source["train"], source["validation"]]
    assert on_disk == found["bytes"] + sum(count["bytes"] for count in source["skipped"].values())
    text = sum(count["bytes"] for count in splits)
    assert text == found["bytes"] - found["replaced_bytes"] + found["put_in_bytes"] + found["recoded_bytes"]
    for count, file in zip(splits, (tokens.train[0], tokens.validation), strict=True):
        assert len(file.tokens) == count["tokens"] == count["bytes"] + 2 * count["documents"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "texts").mkdir()
    return tmp_path / "texts"


def test_all_kinds_of_text_at_once_are_read_or_counted(folder: Path) -> None:
    for name, data in HOSTILE.items():
        (folder / name).write_bytes(data)
    tokens = read(folder)
    adds_up(tokens, sum(map(len, HOSTILE.values())))
    (source,) = tokens.info["sources"]
    assert source["read"]["documents"] == len(HOSTILE) - 1
    assert source["skipped"] == {"empty": {"documents": 1, "bytes": 0, "names": [str(folder / "empty.txt")]}}
    marked = {"utf16.txt": "utf-16", "bom.txt": "utf-8-sig"}
    assert {Path(found["names"][0]).name: name for name, found in source["encodings"].items()} == marked
    utf8 = {name: data for name, data in HOSTILE.items() if name not in marked}
    bad = {name: len(data) - len(data.decode(errors="ignore").encode()) for name, data in utf8.items()}
    assert source["read"]["replaced_bytes"] == sum(bad.values()) > 10
    texts = [data.decode(errors="replace") for data in utf8.values()]
    assert source["read"]["put_in_bytes"] == 3 * (sum(text.count("\ufffd") for text in texts) - 7)  # 7 of marks.txt
    everything = b"".join(tokens.tokenizer.decode_bytes(file.tokens) for file in (tokens.train[0], tokens.validation))
    decoded = [data.decode(marked.get(name, "utf-8"), errors="replace").encode() for name, data in HOSTILE.items()]
    assert len(everything) == sum(map(len, decoded))
    assert all(data[:5] in everything for data in decoded)


def test_white_space_alone_is_a_text_like_any_other(folder: Path) -> None:
    (folder / "white.txt").write_bytes(HOSTILE["white.txt"] * 10)
    tokens = read(folder, tokenizer={"kind": "sentencepiece", "vocabulary": 300})
    everything = b"".join(tokens.tokenizer.decode_bytes(file.tokens) for file in (tokens.train[0], tokens.validation))
    assert everything == HOSTILE["white.txt"] * 10


def test_lone_surrogates_in_records_are_replaced_or_refused(folder: Path) -> None:
    rows = [{"text": "fine " * 40}, {"text": "lone \ud800 one"}]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(UsageError, match=r"rows\.jsonl"):
        read(folder, errors="strict")


def on_second_measure(monkeypatch: pytest.MonkeyPatch, change: Callable[[], object]) -> None:
    """Change a file once it was measured for the second time: the first time near-copies are searched."""
    measure, measured = Document.measure, []

    def measured_then_changed(self: Document) -> Measure:
        measured.append(measure(self))
        if len(measured) == 2:
            change()
        return measured[-1]

    monkeypatch.setattr(Document, "measure", measured_then_changed)


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_a_file_that_shrinks_while_it_is_read_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    compress = gzip.compress if suffix else bytes
    path = folder / f"log.txt{suffix}"
    path.write_bytes(compress(b"0123456789" * 50_000))
    on_second_measure(monkeypatch, lambda: path.write_bytes(compress(b"0123456789" * 20_000)))
    with pytest.raises(UsageError, match=r"log\.txt.*: became shorter while it was read"):
        read(folder)
    assert not [path for path in Path(os.environ["LMLONG_CACHE"], "tokens").rglob("*") if path.is_file()]


def test_a_file_that_grows_while_it_is_read_gives_what_was_measured(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folder / "log.txt"
    path.write_bytes(b"0123456789" * 5000)
    on_second_measure(monkeypatch, lambda: path.write_bytes(b"0123456789" * 5000 + b"late " * 1000))
    tokens = read(folder)
    adds_up(tokens, 50_000)
    assert b"late" not in tokens.tokenizer.decode_bytes(tokens.validation.tokens)
