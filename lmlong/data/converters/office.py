"""Convert DOCX and EPUB, which are ZIP archives of XML, to text."""

import io
from posixpath import dirname, join, normpath
from urllib.parse import unquote
from zipfile import ZipFile

from lmlong.data.converters.document_limits import ALL_PARTS, LARGEST, Broken
from lmlong.data.converters.docx import WordText
from lmlong.data.converters.html import html_text
from lmlong.data.converters.xml import read_elements, read_xml

DOCUMENT = "word/document.xml"
CONTAINER = "META-INF/container.xml"
EPUB_TYPE = "application/epub+zip"


def docx_text(data: bytes, most: int = ALL_PARTS) -> str:
    """Return the text of a DOCX of up to `most` bytes unpacked: a line for each paragraph, a blank line between them,
    cells of a row between tabs."""
    document = WordText()
    read_xml(_part(_opened(data), DOCUMENT, most), DOCUMENT, document.start, document.end, document.data)
    return document.text()


def epub_text(data: bytes, most: int = ALL_PARTS) -> str:
    """Return the text of an EPUB: its pages, of up to `most` bytes unpacked, in the order in which they are read."""
    archive = _opened(data)
    container = read_elements(_part(archive, CONTAINER), CONTAINER)
    package_path = next((about.get("full-path") for tag, about in container if tag == "rootfile"), None)
    if not package_path:
        raise Broken("its container names no package")
    package = read_elements(_part(archive, package_path), package_path)
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
