"""Random documents and archives: whole containers that hold hostile values, and what must hold of each."""

import io
import random
import re
import tarfile
import tempfile
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from lmlong import recipe
from lmlong.data.converters.document_limits import Broken
from lmlong.data.converters.html import html_text
from lmlong.data.converters.office import docx_text, epub_text
from lmlong.data.document import Document
from lmlong.data.sources import open_source
from lmlong.errors import UsageError

MARK = re.compile(r"\[\d+\]")

NAMES = [
    *("p.html", "a b.xhtml", "../up.html", "/etc/passwd", "", ".", "//x", "a\\b.html", "%2e%2e/p.html", "%", "é.html"),
    *("p.html#part", "x" * 300 + ".html", "p\0.html", "CON", "a/" * 200 + "p.html"),
]
VALUES = ["", "0", "-1", "é", "\ud7ff", "a" * 5000, "1e999", "../..", "&amp;", "%00", "[]", "\u202e", "'"]

HTML = """
<p> </p> <div> <svg> </svg> <svg/> <object/> <object> </object> <math> </math> <br/> <td> <li> <pre> </pre> <template>
<script> </script> <style> </style> <head> <title> </head> <body> </body> </> <3 < > & ; <a <!-- --> <a/href=' '> " é
<a/x=" <![CDATA[ ]]> <?xml?> <!DOCTYPE &nbsp &lt; &#x110000; &#99999999999; &#0; &#xd800; <meta/charset=utf-16>
<meta/charset=no> <meta/charset=punycode>
"""
HTML_PARTS = [*HTML.split(), " \t\n", "\0"]

WORD = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
COMPATIBILITY = "http://schemas.openxmlformats.org/markup-compatibility/2006"
USUAL = ["w:p w:r w:t", "w:tbl w:tr w:tc", "w:p w:r mc:AlternateContent mc:Choice w:txbxContent"]
TAGS = """
w:p w:r w:t w:tbl w:tr w:tc w:sdt w:ins w:del w:txbxContent w:body w:pPr w:moveFrom w:hyperlink w:tab w:br
mc:AlternateContent mc:Choice mc:Fallback x
"""
WORD_TAGS = TAGS.split()

DOCTYPES = [
    *("<!DOCTYPE x>", '<!DOCTYPE x SYSTEM "http://x/">', '<!DOCTYPE x [<!ENTITY a "[0][0]">]>'),
    *('<!DOCTYPE x [<!ATTLIST x a CDATA "x">]>', '<!DOCTYPE x [<!ENTITY % b SYSTEM "file:///etc/passwd"> %b;]>'),
]
ENCODINGS = ["utf-8", "utf-8", "utf-8", "utf-16", "iso-8859-1"]


class Draw(random.Random):
    """Random parts of documents. Each mark is put in once."""

    def __init__(self, seed: int):
        super().__init__(seed)
        self.marks = 0

    def mark(self) -> str:
        self.marks += 1
        return f"[{self.marks}]"

    def page(self) -> bytes:
        parts = [self.mark() if self.random() < 0.4 else self.choice(HTML_PARTS) for _ in range(self.randint(0, 40))]
        if self.random() < 0.1:
            parts *= 1 if self.marks else self.randint(1, 3000)
        return "".join(parts).encode(self.choice(ENCODINGS), "replace")

    def xml(self, body: str) -> bytes:
        encoding = self.choice(ENCODINGS)
        declared = encoding if self.random() < 0.95 else self.choice(["utf-7", "cp037", "no-such", "utf-32"])
        doctype = self.choice(DOCTYPES) if self.random() < 0.1 else ""
        text = f'<?xml version="1.0" encoding="{declared}"?>{doctype}{body}'
        return text.encode(encoding, "xmlcharrefreplace")

    def element(self, depth: int) -> str:
        """An element that is well-formed, though not where the format has it."""
        tags = self.choice(USUAL).split() if self.random() < 0.7 else [self.choice(WORD_TAGS)]
        attribute = f' a="{self.choice(VALUES)}"'.replace("&", "") if self.random() < 0.1 else ""
        inside = self.mark() if depth == 0 else "".join(self.element(depth - 1) for _ in range(self.randint(0, 3)))
        inside += self.mark() * (self.random() < 0.5) + "&a;" * (self.random() < 0.01)
        times = self.randint(2, 300) if self.random() < 0.05 else 1
        opened = "".join(f"<{tag}{attribute}>" for tag in tags) * times
        return opened + inside + "".join(f"</{tag}>" for tag in reversed(tags)) * times

    def word(self) -> dict[str, bytes]:
        body = "".join(self.element(self.randint(0, 4)) for _ in range(self.randint(0, 4)))
        spaces = f'xmlns:w="{WORD}" xmlns:mc="{COMPATIBILITY}"'
        return {"word/document.xml": self.xml(f"<w:document {spaces}><w:body>{body}</w:body></w:document>")}

    def book(self) -> dict[str, bytes]:
        package = self.choice(["p.opf", "OPS/p.opf", *NAMES]) if self.random() < 0.3 else "OPS/p.opf"
        shown = package.replace("\0", "")
        names = [*(self.choices(NAMES, k=3) if self.random() < 0.3 else ()), "a.html", "b.html"]
        quoted = [name.replace("\0", "") for name in names]
        kinds = ["application/xhtml+xml", "text/html", *VALUES]
        items = "".join(
            f'<item id="{self.choice("abc")}" href="{name}" media-type="{self.choice(kinds[:3])}"/>' for name in quoted
        )
        order = "".join(f'<itemref idref="{self.choice("abcd")}"/>' for _ in range(self.randint(0, 20)))
        spine = self.choice([order, order, order, "<itemref/>" + order, "<spine>" * 400 + order + "</spine>" * 400])
        return {
            "META-INF/container.xml": self.xml(f'<container><rootfile full-path="{shown}"/></container>'),
            package: self.xml(f"<package><item/>{items}{spine}</package>"),
            **{name if self.random() < 0.1 else f"OPS/{name}": self.page() for name in names},
        }

    def zip(self, files: dict[str, bytes]) -> bytes:
        """A ZIP of these files, a few of them twice."""
        file = io.BytesIO()
        with warnings.catch_warnings(), zipfile.ZipFile(file, "w") as archive:
            warnings.simplefilter("ignore")  # a name that is there twice
            for name, data in files.items():
                for _ in range(1 + (self.random() < 0.1)):
                    entry = zipfile.ZipInfo(name or "x")
                    entry.compress_type = self.choice([0, 8, 8, 8, 12, 14])
                    entry.extra = self.randbytes(8) if self.random() < 0.05 else b""
                    archive.writestr(entry, data)
        return file.getvalue()

    def tar(self, files: dict[str, bytes]) -> bytes:
        file = io.BytesIO()
        kinds = [tarfile.SYMTYPE, tarfile.CHRTYPE, tarfile.DIRTYPE, tarfile.GNUTYPE_SPARSE, tarfile.XHDTYPE, b"~"]
        kinds += [tarfile.GNUTYPE_LONGNAME, tarfile.LNKTYPE, tarfile.XGLTYPE]
        with tarfile.open(fileobj=file, mode=self.choice(["w", "w:gz", "w:xz", "w:bz2"])) as archive:  # type: ignore[call-overload]
            for name, data in files.items():
                entry = tarfile.TarInfo(name)
                entry.size = len(data)
                if self.random() < 0.3:
                    entry.type = self.choice(kinds)
                    entry.linkname = self.choice(NAMES).replace("\0", "")
                if self.random() < 0.1:
                    entry.pax_headers = {"path": self.choice(NAMES), "size": self.choice(VALUES)}
                archive.addfile(entry, io.BytesIO(data))
        return file.getvalue()


def _document(convert: Callable[[bytes], str], data: bytes, limit: int) -> tuple[str, list[str]]:
    """Convert a document; complain of text that is there more often than in the document."""
    try:
        text = convert(data)
    except Broken:
        return "refused", []
    complaints = [f"{mark} is there {count} times" for mark, count in Counter(MARK.findall(text)).items() if count > 1]
    complaints += [f"{len(text)} characters of {limit} bytes"] if len(text) > limit + 1 else []
    text.encode("utf-8", "replace")
    return "converted", complaints


def _archive(data: bytes, suffix: str) -> tuple[str, list[str]]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"drawn{suffix}"
        path.write_bytes(data)
        texts, reasons = [], []
        try:
            for found in open_source(recipe.Files(kind="files", paths=[str(path)]), "strict").documents():
                if isinstance(found, Document):
                    texts.extend(found.pieces())
                    found.measure()
                else:
                    reasons.append(found.reason)
        except UsageError as error:
            return "refused", [] if path.name in str(error) else [str(error)]
        return "read" if texts else "left out", [reason for reason in reasons if not reason.strip() or "\n" in reason]


def fuzz(number: int) -> tuple[str, list[str]]:
    """Draw a document or an archive and read it; return its kind and what came of it, and complaints."""
    draw = Draw(number)
    kind = draw.choice(["html", "docx", "docx", "epub", "epub", "zip", "tar"])
    if kind == "html":
        page = draw.page()
        outcome, complaints = _document(html_text, page, 3 * len(page))
    elif kind in ("docx", "epub"):
        files = draw.word() if kind == "docx" else draw.book()
        size = 3 * sum(map(len, files.values()))
        outcome, complaints = _document(docx_text if kind == "docx" else epub_text, draw.zip(files), size)
    else:
        texts = [b"", b"one", draw.page(), "zwei ä".encode("latin-1"), b"\0\xff" * 9, "drei".encode("utf-16")]
        names = [name.replace(".html", draw.choice([".txt", ".md", ".html"])) for name in draw.sample(NAMES, k=5)]
        files = {name: draw.choice(texts) for name in [*names, "last.txt"]}
        outcome, complaints = _archive(*((draw.zip(files), ".zip") if kind == "zip" else (draw.tar(files), ".tar")))
    return f"{kind} {outcome}", complaints
