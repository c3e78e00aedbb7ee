"""The program that converts uploaded files to text in a `LimitedProcess`: a small file may expand to gigabytes."""

from io import BytesIO
from typing import Any

from lmlong.data.converters import Broken, check_text
from lmlong.data.converters.office import kind_of_zip
from lmlong.data.converters.worker import CONVERTERS
from lmlong.data.formats.compression import COMPRESSED, DAMAGED, decompressed
from lmlong.data.formats.table import suffix_of_bytes
from lmlong.io.limited_process import answer_requests

MEMORY = 2 << 30
"""Bytes of address space."""

MARKUP = 4
"""Maximum bytes of unpacked markup for each byte of the longest text."""


def text_of(request: dict[str, Any]) -> bytes:
    """Return the text of a file with a `suffix`, of up to `longest` bytes: of a document in UTF-8, of a compressed file
    in its own encoding."""
    data, suffix, longest = request["data"], request["suffix"], request["longest"]
    if suffix in COMPRESSED:
        return _decompressed(data, suffix, longest)
    convert = CONVERTERS[kind_of_zip(data) if suffix == ".zip" else suffix]
    text = convert(data, MARKUP * longest).encode("utf-8", "replace")
    if not text:
        raise Broken("no text in it")
    check_text(len(text), longest)
    return text


def _decompressed(data: bytes, suffix: str, longest: int) -> bytes:
    chunks, size = [], 0
    try:
        for chunk in decompressed(BytesIO(data), suffix):
            chunks.append(chunk)
            size += len(chunk)
            if size > longest:
                raise Broken(f"it unpacks to more than {longest:,} bytes")
    except (*DAMAGED, OSError) as error:
        raise Broken(f"damaged or of another kind: {error}") from None
    text = b"".join(chunks)
    if suffix_of_bytes(text):
        raise Broken("there is a document or a compressed file in it: unpack it")
    return text


if __name__ == "__main__":
    answer_requests(text_of, MEMORY, (Broken,))
