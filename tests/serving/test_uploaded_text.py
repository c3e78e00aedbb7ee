"""The text of a file that is uploaded to a server."""

import gzip

import pytest
from data.made_documents import html, zipped

from lmlong.serving.api_errors import ApiError
from lmlong.serving.bodies import text_of_file


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32"])
def test_a_text_is_read_in_the_encoding_of_its_mark(encoding: str) -> None:
    assert text_of_file("naïve Bären".encode(encoding)) == "naïve Bären"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (zipped({"word/document.xml": b""}), "a document or compressed, which is not converted here"),
        (b"%PDF-1.7", "a document or compressed"),
        (gzip.compress(html()), "a document or compressed"),
        ("naïve".encode("latin-1"), "not UTF-8 at byte 2"),
        (b"\xff\xfea", "not UTF-16 at byte 2"),
        (b"a\0b", "U\\+0000"),
    ],
)
def test_what_is_no_text_is_refused_with_the_reason(data: bytes, message: str) -> None:
    with pytest.raises(ApiError, match=message):
        text_of_file(data)
