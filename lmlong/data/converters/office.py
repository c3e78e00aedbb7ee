"""DOCX and EPUB -> text: both are ZIP archives of XML."""

import io
import re
from posixpath import dirname, join, normpath
from urllib.parse import unquote
from xml.etree import ElementTree
from zipfile import BadZipFile, ZipFile

from lmlong.data.converters.html import html_text

WORD = "{http://schemas.openxmlformats.org/wordprocessingml/2006/main}"
DOCUMENT = "word/document.xml"
CONTAINER = "META-INF/container.xml"

LARGEST = 1 << 28
"""Bytes of the largest part that is unpacked."""

ALL_PARTS = 1 << 30
"""Bytes of all parts that are unpacked."""

ENTITY = re.compile(rb"<!ENTITY")


class Broken(Exception):
    """A file that is not what it seems, with the reason."""


def docx_text(data: bytes) -> str:
    """Return the text of a DOCX: a line for each paragraph, a blank line between them, cells of a row between tabs."""
    root = _xml(_part(_opened(data), DOCUMENT), DOCUMENT)
    body = root.find(f"{WORD}body")
    blocks = [block for element in (body if body is not None else []) for block in _blocks(element)]
    return "\n\n".join(blocks) + "\n" if blocks else ""


def epub_text(data: bytes) -> str:
    """Return the text of an EPUB: its pages in the order in which they are read."""
    archive = _opened(data)
    container = _xml(_part(archive, CONTAINER), CONTAINER)
    package_path = next((e.get("full-path") for e in container.iter() if _name(e) == "rootfile"), None)
    if not package_path:
        raise Broken("its container names no package")
    package = _xml(_part(archive, package_path), package_path)
    items = {e.get("id"): e for e in package.iter() if _name(e) == "item"}
    texts, unpacked = [], 0
    for reference in (e.get("idref") for e in package.iter() if _name(e) == "itemref"):
        item = items.get(reference)
        if item is not None and "html" in (item.get("media-type") or ""):
            path = normpath(join(dirname(package_path), unquote(item.get("href") or "")))
            page = _part(archive, path)
            unpacked += len(page)
            if unpacked > ALL_PARTS:
                raise Broken(f"its pages unpack to more than {ALL_PARTS >> 20} MB")
            texts.append(html_text(page))
    return "\n".join(filter(None, texts))


def _opened(data: bytes) -> ZipFile:
    try:
        return ZipFile(io.BytesIO(data))
    except (BadZipFile, ValueError, OSError) as error:
        raise Broken(f"no ZIP archive ({error})") from None


def _part(archive: ZipFile, name: str) -> bytes:
    """Return a part, unpacked, in bounded memory whatever it says of its size."""
    try:
        with archive.open(name) as file:
            data = file.read(LARGEST + 1)
    except KeyError:
        raise Broken(f"it has no {name}") from None
    except RuntimeError:
        raise Broken("encrypted") from None
    except Exception as error:  # zipfile, zlib, bz2 and lzma raise a dozen types for damaged parts
        raise Broken(f"{name} is damaged ({error})") from None
    if len(data) > LARGEST:
        raise Broken(f"{name} unpacks to more than {LARGEST >> 20} MB")
    return data


def _xml(data: bytes, name: str) -> ElementTree.Element:
    if ENTITY.search(data):
        raise Broken(f"{name} declares entities, which may stand for more than memory holds")
    try:
        return ElementTree.fromstring(data)
    except (ElementTree.ParseError, ValueError, LookupError) as error:
        raise Broken(f"{name} is no XML ({error})") from None


def _name(element: ElementTree.Element) -> str:
    return str(element.tag).rpartition("}")[2]


def _blocks(element: ElementTree.Element) -> list[str]:
    """Return the paragraphs and tables of a part of a body that are not empty."""
    if element.tag == f"{WORD}p":
        return list(filter(None, [_paragraph(element)]))
    if element.tag == f"{WORD}tbl":
        rows = [[_cell(cell) for cell in row.iter(f"{WORD}tc")] for row in element.iter(f"{WORD}tr")]
        return ["\n".join("\t".join(row) for row in rows)] if rows else []
    if element.tag in (f"{WORD}sdt", f"{WORD}sdtContent", f"{WORD}customXml", f"{WORD}ins"):
        return [block for below in element for block in _blocks(below)]
    return []


def _cell(cell: ElementTree.Element) -> str:
    return " ".join(filter(None, (_paragraph(paragraph) for paragraph in cell.iter(f"{WORD}p"))))


def _paragraph(paragraph: ElementTree.Element) -> str:
    """Return the text of a paragraph; what was deleted in it stands in other elements."""
    signs = {f"{WORD}tab": "\t", f"{WORD}br": "\n", f"{WORD}cr": "\n", f"{WORD}noBreakHyphen": "\u2011"}
    parts = ((e.text or "") if e.tag == f"{WORD}t" else signs.get(str(e.tag), "") for e in paragraph.iter())
    return "".join(parts).strip("\n")
