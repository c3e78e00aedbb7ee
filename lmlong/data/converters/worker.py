"""The program that converts documents, for a `LimitedProcess`: files may be made to take all time and memory."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from lmlong.data.converters.html import html_text
from lmlong.data.converters.limits import Broken, check_text
from lmlong.data.converters.office import docx_text, epub_text
from lmlong.data.converters.pdf import pdf_text
from lmlong.io.limited_process import answer_requests

MEMORY = 4 << 30
"""Bytes of address space."""

CONVERTERS: dict[str, Callable[[bytes], str]] = {
    ".docx": docx_text,
    ".epub": epub_text,
    ".htm": html_text,
    ".html": html_text,
    ".pdf": pdf_text,
    ".xhtml": html_text,
}


def convert(request: dict[str, Any]) -> bytes:
    """Return the text of the file at `path`, of a `kind`, in UTF-8."""
    data = CONVERTERS[request["kind"]](Path(request["path"]).read_bytes()).encode("utf-8", "replace")
    check_text(len(data))
    return data


if __name__ == "__main__":
    answer_requests(convert, MEMORY, (Broken, OSError))
