"""Convert DOCX and EPUB, which are ZIP archives of XML, to text.

XML with entity declarations is refused, since they let a small file expand to a large one.
"""

import io
from collections.abc import Callable
from posixpath import dirname, join, normpath
from typing import NoReturn
from urllib.parse import unquote
from xml.parsers import expat
from zipfile import ZipFile

from lmlong.data.converters import ALL_PARTS, LARGEST, Broken
from lmlong.data.converters.docx import WordText
from lmlong.data.converters.html import html_text

DOCUMENT = "word/document.xml"
CONTAINER = "META-INF/container.xml"
EPUB_TYPE = "application/epub+zip"

Attributes = dict[str, str]


def docx_text(data: bytes, most: int = ALL_PARTS) -> str:
    """Return the text of a DOCX of up to `most` bytes unpacked: a line for each paragraph, a blank line between them,
    cells of a row between tabs."""
    document = WordText()
    _read_xml(_part(_opened(data), DOCUMENT, most), DOCUMENT, document.start, document.end, document.data)
    return document.text()


def epub_text(data: bytes, most: int = ALL_PARTS) -> str:
    """Return the text of an EPUB: its pages, of up to `most` bytes unpacked, in the order in which they are read."""
    archive = _opened(data)
    container = _read_elements(_part(archive, CONTAINER), CONTAINER)
    package_path = next((about.get("full-path") for tag, about in container if tag == "rootfile"), None)
    if not package_path:
        raise Broken("its container names no package")
    package = _read_elements(_part(archive, package_path), package_path)
    items = {about.get("id"): about for tag, about in package if tag == "item"}
    order = [items.get(about.get("idref"), {}) for tag, about in package if tag == "itemref"]
    pages = [item.get("href", "") for item in order if "html" in item.get("media-type", "")]
    texts, unpacked = [], 0
    for page in dict.fromkeys(pages):  # a page that is listed again is not read again
        data = _part(archive, normpath(join(dirname(package_path), unquote(page))), most)
        unpacked += len(data)
        if unpacked > most:
            raise Broken(f"its pages unpack to more than {most:,} bytes")
        texts.append(html_text(data))
    return "\n".join(filter(None, texts))


def kind_of_zip(data: bytes) -> str:
    """Return the suffix of the document that a ZIP archive is."""
    archive = _opened(data)
    names = set(archive.namelist())
    if DOCUMENT in names:
        return ".docx"
    if "mimetype" in names and _part(archive, "mimetype").strip() == EPUB_TYPE.encode():
        return ".epub"
    raise Broken("neither an EPUB nor a DOCX: unpack it")


def _opened(data: bytes) -> ZipFile:
    try:
        return ZipFile(io.BytesIO(data))
    except Exception as error:  # zipfile, zlib, bz2 and lzma raise a dozen types for damaged archives
        raise Broken(f"no ZIP archive ({error})") from None


def _part(archive: ZipFile, name: str, most: int = LARGEST) -> bytes:
    """Return a part, unpacked, in bounded memory whatever it says of its size."""
    most = min(most, LARGEST)
    try:
        with archive.open(name) as file:
            data = file.read(most + 1)
    except KeyError:
        raise Broken(f"it has no {name}") from None
    except RuntimeError:
        raise Broken("encrypted") from None
    except Exception as error:  # see `_opened`
        raise Broken(f"{name} is damaged ({error})") from None
    if len(data) > most:
        raise Broken(f"{name} unpacks to more than {most:,} bytes")
    return data


def _read_xml(
    data: bytes,
    name: str,
    start: Callable[[str, Attributes], object],
    end: Callable[[str], object] | None = None,
    text: Callable[[str], object] | None = None,
) -> None:
    """Call `start`, `end` and `text` for the elements of a part and the text between them. Names are "namespace name".

    An internal DTD is refused in any encoding: its entities and default attributes may stand for gigabytes.
    """

    def doctype(root: str, system: str | None, public: str | None, has_internal: int) -> None:
        if has_internal:
            refuse()

    def refuse(*declaration: object) -> NoReturn:
        raise Broken(f"{name} declares entities or attributes, which may stand for more than memory holds")

    parser = expat.ParserCreate(namespace_separator=" ")
    parser.buffer_text = True
    parser.StartDoctypeDeclHandler = doctype
    parser.EntityDeclHandler = refuse
    parser.StartElementHandler = start
    parser.EndElementHandler = end
    parser.CharacterDataHandler = text
    try:
        parser.Parse(data, True)
    except (expat.ExpatError, ValueError, LookupError) as error:
        raise Broken(f"{name} is not valid XML ({error})") from None


def _read_elements(data: bytes, name: str) -> list[tuple[str, Attributes]]:
    """Return the elements of a part in order, each by its name without the namespace."""
    found: list[tuple[str, Attributes]] = []
    _read_xml(data, name, lambda tag, attributes: found.append((tag.rpartition(" ")[2], attributes)))
    return found
