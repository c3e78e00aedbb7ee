"""The encoding of a file is detected if it is certain enough; otherwise an error says what to do."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmlong.data.document import Document
from lmlong.data.encoding import Piece, decode, find_encoding
from lmlong.errors import UsageError

FRENCH = "Le garçon a mangé une pomme au bord du chemin, puis il est rentré chez lui. " * 40
RUSSIAN = "Все счастливые семьи похожи друг на друга. " * 40


def found(data: bytes, wanted: str = "auto", size: int = 7) -> str:
    return find_encoding(lambda: (data[place : place + size] for place in range(0, len(data), size)), "a.txt", wanted)


@pytest.mark.parametrize(
    ("encoding", "detected"),
    [
        *(("utf-8", "utf-8"), ("utf-8-sig", "utf-8-sig"), ("utf-16", "utf-16"), ("utf-32", "utf-32")),
        ("cp1252", "windows-1252"),
    ],
)
def test_auto_detects_an_encoding_by_its_mark_or_by_strict_decoding(encoding: str, detected: str) -> None:
    data = FRENCH.encode(encoding)
    assert found(data, size=1000) == detected
    assert "".join(piece.text for piece in decode(iter([data]), "a.txt", "strict", detected)) == FRENCH


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


def test_measure_counts_text_and_what_was_replaced(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"a\xff\xfe" + "\ufffd".encode() + b"\xe4\xb8")
    measure = Document.of_file(path, "replace").measure()
    assert (measure.replaced_bytes, measure.put_in_bytes) == (4, 9)  # without the U+FFFD of the file
    assert measure.bytes == len("a\ufffd\ufffd\ufffd\ufffd".encode())
    assert measure.digest == Document.of_text("other name", "a\ufffd\ufffd\ufffd\ufffd", "strict").measure().digest
