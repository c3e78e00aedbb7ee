"""The table of file formats."""

from pathlib import Path

import pytest

from lmlong.data.document import ReadOptions
from lmlong.data.formats.compression import COMPRESSED
from lmlong.data.formats.table import FORMATS, UNKNOWN, format_of

FINGERPRINTS = {
    "a.txt": "text .txt .txt",
    "a.TXT.gz": "text .txt .gz",
    "a.jsonl": "text .jsonl .jsonl as json auto",
    "a.tsv.xz": "text .tsv .xz as csv auto",
    "a.fa": "text .fa .fa soft masks keep",
    "a.tar.gz": "text .tar .gz archive auto",
    "a.html": "text .html .html by 2",
    "README": "text  ",
}


@pytest.mark.parametrize("name", FINGERPRINTS)
def test_the_fingerprint_of_a_format_is_stable_so_that_cached_tokens_stay_valid(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"")
    path = tmp_path / name
    if name.endswith((".gz", ".xz")):
        path.write_bytes(b"not compressed")  # which `check` reports, not the fingerprint
    assert format_of(path).fingerprint(path, ReadOptions()) == FINGERPRINTS[name]


@pytest.mark.parametrize("suffix", FORMATS)
def test_a_suffix_is_looked_up_in_any_case_and_with_a_compression_where_that_is_supported(suffix: str) -> None:
    file_format = FORMATS[suffix]
    assert format_of(Path(f"a{suffix.upper()}")) is file_format
    for compression in COMPRESSED:
        compressed = format_of(Path(f"a{suffix}{compression}"))
        assert (compressed is file_format) == (compression in file_format.compressions)


def test_a_compressed_document_is_refused_and_a_compressed_zip_is_unknown() -> None:
    assert format_of(Path("a.pdf.gz")).refusal == "a compressed document: unpack it"
    assert format_of(Path("a.zip.gz")) is format_of(Path("a.tar.zst")) is format_of(Path("a.log")) is UNKNOWN
