"""Encodings are detected if they are certain enough; of damaged texts no byte is lost without being counted."""

import gzip
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmlong.data.document import Document, Measure
from lmlong.data.encoding import Piece, decode, find_encoding
from lmlong.data.token_dataset import TokenDataset, prepare
from lmlong.errors import UsageError

from .conftest import text_over

FRENCH = "Le garçon a mangé une pomme au bord du chemin, puis il est rentré chez lui. " * 40
RUSSIAN = "Все счастливые семьи похожи друг на друга. " * 40


def found(data: bytes, wanted: str = "auto", size: int = 7) -> str:
    return find_encoding(lambda: (data[place : place + size] for place in range(0, len(data), size)), "a.txt", wanted)


DETECTED = {
    "utf-8": "utf-8",
    "utf-8-sig": "utf-8-sig",
    "utf-16": "utf-16",
    "utf-32": "utf-32",
    "cp1252": "windows-1252",
}


@pytest.mark.parametrize("encoding", DETECTED)
def test_auto_detects_an_encoding_by_its_mark_or_by_strict_decoding(encoding: str) -> None:
    data = FRENCH.encode(encoding)
    assert found(data, size=1000) == DETECTED[encoding]
    assert "".join(piece.text for piece in decode(iter([data]), "a.txt", "strict", DETECTED[encoding])) == FRENCH


@pytest.mark.parametrize(
    ("data", "remedy"),
    [
        (RUSSIAN.encode("cp1251"), "Name its encoding, such as text.encoding=windows-1251"),
        (RUSSIAN.encode("shift_jis"), "Name its encoding"),
        (FRENCH.encode() + b"\xff" + FRENCH.encode(), "damaged UTF-8: repair it, or set text.errors=replace"),
        (RUSSIAN.encode("utf-16-le")[:-1] + b"\xd8", "text.encoding=utf-16-le"),
        (bytes(range(256)) * 4, "Name its encoding"),
        (FRENCH.encode("cp1252") + b"\x81", "Name its encoding"),  # which windows-1252 does not define
    ],
)
def test_what_is_not_certain_is_refused_with_what_to_do(data: bytes, remedy: str) -> None:
    with pytest.raises(UsageError, match=rf"a.txt: byte \d+ is not UTF-8 .*{remedy}") as caught:
        found(data)
    assert ("errors=replace" in str(caught.value)) == ("damaged" in remedy)


def test_a_named_encoding_is_the_only_one_tried() -> None:
    assert found(RUSSIAN.encode("cp1251"), "windows-1251") == "windows-1251"
    with pytest.raises(UsageError, match=r"a.txt: byte 3 is not ascii"):
        found("abcé".encode(), "ascii")
    with pytest.raises(UsageError, match=r"a.txt: byte 6 is not utf-16-le"):
        found("abc".encode("utf-16-le") + b"\0\xdc\0\0", "utf-16-le")


ENCODINGS = ["utf-8", "utf-8-sig", "utf-16-le", "shift_jis", "cp1252"]


def joined(data: bytes, size: int, encoding: str) -> Piece:
    """Decode data in chunks of a size, and return all pieces as one."""
    chunks = (data[place : place + size] for place in range(0, len(data), size))
    pieces = list(decode(chunks, "name", "replace", encoding))
    invalid, replacements = sum(p.invalid_bytes for p in pieces), sum(p.replacements for p in pieces)
    return Piece("".join(p.text for p in pieces), invalid, replacements)


@given(st.binary(max_size=60), st.sampled_from(ENCODINGS), st.integers(1, 9), st.booleans())
def test_pieces_may_be_cut_anywhere_and_replacements_are_counted(
    data: bytes, encoding: str, size: int, is_marked: bool
) -> None:
    data = b"\xef\xbb\xbf" * is_marked + data
    found = joined(data, size, encoding)
    assert found == joined(data, 100, encoding)
    if encoding.startswith("utf-8"):
        assert found.text == data.decode(encoding, "replace")
        assert found.invalid_bytes == len(data) - len(data.decode("utf-8", "ignore").encode())
        assert found.replacements == found.text.count("\ufffd") - data.decode("utf-8", "ignore").count("\ufffd")
    else:
        assert found.invalid_bytes == found.replacements <= found.text.count("\ufffd")
        assert found.invalid_bytes or found.text == data.decode(encoding)


def test_the_error_names_the_byte_in_a_later_chunk_and_at_the_end() -> None:
    data = "ab".encode("utf-16-le") * 10 + b"\0\xdc"
    with pytest.raises(UsageError, match="byte 40 is not utf-16-le"):
        list(decode((data[place : place + 7] for place in range(0, 42, 7)), "name", "strict", "utf-16-le"))
    for mark, encoding, byte in ((b"", "utf-8", 2), (b"\xef\xbb\xbf", "utf-8-sig", 5)):
        with pytest.raises(UsageError, match=f"byte {byte} is not UTF-8"):
            list(decode(iter([mark, b"ab\xe4", b"\xb8"]), "name", "strict", encoding))


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


def read(folder: Path) -> TokenDataset:
    return prepare(text_over(folder, errors="replace"))


def adds_up(tokens: TokenDataset, on_disk: int) -> None:
    """Bytes on disk = read + skipped; text = read - replaced + put in; tokens = text + bos and eos."""
    (source,) = tokens.info["sources"]
    found, splits = source["read"], [source["train"], source["validation"]]
    assert on_disk == found["bytes"] + sum(count["bytes"] for count in source["skipped"].values())
    text = sum(count["bytes"] for count in splits)
    assert text == found["bytes"] - found["replaced_bytes"] + found["put_in_bytes"] + found["recoded_bytes"]
    for count, file in zip(splits, (tokens.train[0], tokens.validation), strict=True):
        assert len(file.tokens) == count["tokens"] == count["bytes"] + 2 * count["documents"]


def test_all_kinds_of_text_at_once_are_read_or_counted(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path, suffix: str
) -> None:
    compress, path = gzip.compress if suffix else bytes, tmp_path / f"log.txt{suffix}"
    path.write_bytes(compress(b"0123456789" * 50_000))
    on_second_measure(monkeypatch, lambda: path.write_bytes(compress(b"0123456789" * 20_000)))
    with pytest.raises(UsageError, match=r"log\.txt.*: became shorter while it was read"):
        read(path)
    assert not [path for path in (cache / "tokens").rglob("*") if path.is_file()]


def test_a_file_that_grows_while_it_is_read_gives_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "log.txt"
    path.write_bytes(b"0123456789" * 5000)
    on_second_measure(monkeypatch, lambda: path.write_bytes(b"0123456789" * 5000 + b"late " * 1000))
    tokens = read(path)
    adds_up(tokens, 50_000)
    assert b"late" not in tokens.tokenizer.decode_bytes(tokens.validation.tokens)
