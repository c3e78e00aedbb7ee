"""Reading is exact: every byte of the file reaches the text, whatever it lies in and wherever the pieces are cut."""

import gzip
from pathlib import Path

import pytest
import zstandard

from lmlong.data.document import CHUNK, text_document
from lmlong.data.formats.base import file_document
from lmlong.errors import UsageError

TRICKY = "\ufeffone\r\ntwo\rthree\n\0\u2028 ünï 中文 😀" * 9000


def compressed(data: bytes, suffix: str) -> bytes:
    return {"": data, ".gz": gzip.compress(data, 1), ".zst": zstandard.compress(data)}[suffix]


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_text_is_what_was_written(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"text.txt{suffix}"
    path.write_bytes(compressed(TRICKY.encode(), suffix))
    pieces = list(file_document(path, "strict").pieces())
    assert "".join(pieces) == TRICKY
    assert max(map(len, pieces)) <= 2 * CHUNK


def test_a_zst_file_of_several_frames_is_read_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "a.zst"
    path.write_bytes(zstandard.compress(b"one ") + zstandard.compress(b"two"))
    assert "".join(file_document(path, "strict").pieces()) == "one two"


@pytest.mark.parametrize("place", [0, 5, CHUNK - 1, CHUNK, 3 * CHUNK + 17])
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_the_error_names_file_and_byte(tmp_path: Path, place: int, suffix: str) -> None:
    path = tmp_path / f"bad.txt{suffix}"
    path.write_bytes(compressed(b"x" * place + b"\xff" + b"y" * CHUNK, suffix))
    with pytest.raises(UsageError, match=rf"bad.txt{suffix}: byte {place} is not UTF-8.*text.errors=replace"):
        list(file_document(path, "strict").pieces())


def test_measure_counts_text_and_what_was_replaced(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"a\xff\xfe" + "\ufffd".encode() + b"\xe4\xb8")
    measure = file_document(path, "replace").measure()
    assert (measure.replaced_bytes, measure.put_in_bytes) == (4, 9)  # without the U+FFFD of the file
    assert measure.bytes == len("a\ufffd\ufffd\ufffd\ufffd".encode())
    assert measure.digest == text_document("other name", "a\ufffd\ufffd\ufffd\ufffd", "strict").measure().digest
