"""Small real files of every kind, written by other people's programs where there are some."""

import io
import tarfile
import zipfile
from collections.abc import Callable, Sequence
from typing import Any

import pytest

PAGE = """<?xml version="1.0" encoding="utf-8"?>
<html xmlns="http://www.w3.org/1999/xhtml"><head><title>Not read</title><style>p {{ }}</style></head>
<body><h1>{title}</h1><p>It was a <i>dark</i>
night &amp; c&#xF6;ld.</p><!-- no --><p>Second<br/>line.</p><ul><li>one</li><li>two</li></ul>
<script>var x = "<p>no</p>";</script><pre>  kept
    as it is</pre><table><tr><th>a</th><td>b</td></tr><tr><td>c</td><td>d</td></tr></table></body></html>"""

PAGE_TEXT = """{title}

It was a dark night & cöld.

Second
line.

one
two

  kept
    as it is

a\tb
c\td
"""


def html() -> bytes:
    return PAGE.format(title="Page").encode()


def epub(page: bytes | None = None) -> bytes:
    """Two chapters, in the order of the spine and not of their names; `page` replaces each."""
    container = (
        '<container version="1.0" xmlns="urn:oasis:names:tc:opendocument:xmlns:container"><rootfiles>'
        '<rootfile full-path="OPS/book.opf" media-type="application/oebps-package+xml"/></rootfiles></container>'
    )
    items = "".join(
        f'<item id="{name}" href="{name}%20page.xhtml" media-type="application/xhtml+xml"/>' for name in ("a", "b")
    )
    package = (
        '<package xmlns="http://www.idpf.org/2007/opf" version="3.0"><manifest>'
        f'{items}<item id="c" href="c.css" media-type="text/css"/></manifest>'
        '<spine><itemref idref="b"/><itemref idref="a"/><itemref idref="c"/></spine></package>'
    )
    parts = {"mimetype": "application/epub+zip", "META-INF/container.xml": container, "OPS/book.opf": package}
    pages = {f"OPS/{name} page.xhtml": page or PAGE.format(title=name).encode() for name in ("a", "b")}
    return zipped({**{name: text.encode() for name, text in parts.items()}, **pages})


def docx() -> bytes:
    written = pytest.importorskip("docx").Document()
    written.add_heading("A title", 1)
    paragraph = written.add_paragraph("It was a dark night — ")
    paragraph.add_run("naïve & <bold>").bold = True
    written.add_paragraph("a\tb\nc")
    table = written.add_table(2, 2)
    for number, text in enumerate("abcd"):
        table.cell(number // 2, number % 2).text = text
    return saved(written.save)


DOCX_TEXT = "A title\n\nIt was a dark night — naïve & <bold>\n\na\tb\nc\n\na\tb\nc\td\n"


def locked(archive: bytes) -> bytes:
    """A ZIP archive whose entries have the flag of encryption."""
    data = bytearray(archive)
    for signature, place in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        at = -1
        while (at := data.find(signature, at + 1)) >= 0:
            data[at + place] |= 1
    return bytes(data)


PDF_PAGES = (["It was a dark night.", "Second line."], ["Page two."])


def pdf(pages: Sequence[list[str]] = PDF_PAGES, password: str | None = None) -> bytes:
    written = pytest.importorskip("fpdf").FPDF()
    if password is not None:
        written.set_encryption(owner_password=password, user_password=password)
    for page in pages:
        written.add_page()
        written.set_font("helvetica", size=12)
        for line in page:
            written.cell(text=line, new_x="LMARGIN", new_y="NEXT")
    return bytes(written.output())


PDF_TEXT = "It was a dark night.\nSecond line.\n\nPage two.\n"

FASTA = b">chr1 the first\nACGTacgtNN\nACGT\n\n>chr2\n; a remark\nTTTT\r\nGG\n"

FILES = {"a.txt": b"one", "below/b.md": b"two", "c.png": b"\x89PNG", ".hidden/d.txt": b"no", "empty.txt": b""}


def zipped(files: dict[str, bytes], **options: Any) -> bytes:
    def write(file: io.BytesIO) -> None:
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, **options) as archive:
            for name, data in files.items():
                archive.writestr(name, data)

    return saved(write)


def tarred(files: dict[str, bytes], mode: str = "w:gz") -> bytes:
    def write(file: io.BytesIO) -> None:
        with tarfile.open(fileobj=file, mode=mode) as archive:  # type: ignore[call-overload]
            for name, data in files.items():
                entry = tarfile.TarInfo(name)
                entry.size = len(data)
                archive.addfile(entry, io.BytesIO(data))
            link = tarfile.TarInfo("link.txt")
            link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
            archive.addfile(link)

    return saved(write)


def saved(save: Callable[[io.BytesIO], object]) -> bytes:
    file = io.BytesIO()
    save(file)
    return file.getvalue()


KINDS: dict[str, Callable[[], bytes]] = {
    "html": html,
    "epub": epub,
    "docx": docx,
    "pdf": pdf,
    "fa": lambda: FASTA,
    "zip": lambda: zipped(FILES),
    "tar.gz": lambda: tarred(FILES),
    "tar.xz": lambda: tarred(FILES, "w:xz"),
}
