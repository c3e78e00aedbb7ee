"""The program that converts documents in a `LimitedProcess`, since a hostile file may use unlimited time and memory."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from lmlong.data.converters import ALL_PARTS, LARGEST, Broken, check_text
from lmlong.data.converters.html import html_text
from lmlong.data.converters.office import docx_text, epub_text
from lmlong.io.limited_process import answer_requests

MEMORY = 4 << 30
"""Bytes of address space."""


def page_text(data: bytes, most: int) -> str:
    return html_text(data)  # a page is not compressed


def pdf_text(data: bytes, most: int = LARGEST) -> str:
    """Return the text of a PDF of up to `most` characters by PDFium, the library of Chromium; a blank line separates
    pages."""
    import pypdfium2

    texts, size = [], 0
    try:
        document = pypdfium2.PdfDocument(data)
        for number in range(len(document)):
            page = document[number].get_textpage().get_text_bounded()
            texts.append(page.replace("\r\n", "\n").replace("\r", "\n").replace("\ufffe", "").strip("\n"))
            size += len(page)
            check_text(size, min(most, LARGEST))
    except pypdfium2.PdfiumError as error:
        raise Broken("encrypted" if "password" in str(error) else str(error).rstrip(".")) from None
    return "\n\n".join(filter(None, texts)) + "\n" if any(texts) else ""


CONVERTERS: dict[str, Callable[[bytes, int], str]] = {
    ".docx": docx_text,
    ".epub": epub_text,
    ".htm": page_text,
    ".html": page_text,
    ".pdf": pdf_text,
    ".xhtml": page_text,
}
"""Suffix -> function (data, most) that returns the text of a document of at most `most` bytes unpacked."""


def convert(request: dict[str, Any]) -> bytes:
    """Return the text of the file at `path`, of a `kind`, in UTF-8."""
    text = CONVERTERS[request["kind"]](Path(request["path"]).read_bytes(), ALL_PARTS)
    data = text.encode("utf-8", "replace")
    check_text(len(data))
    return data


if __name__ == "__main__":
    answer_requests(convert, MEMORY, (Broken, OSError))
