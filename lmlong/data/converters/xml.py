"""Read XML element by element, without entity declarations, which let a small file expand to a large one."""

from collections.abc import Callable
from typing import NoReturn
from xml.parsers import expat

from lmlong.data.converters.document_limits import Broken

Attributes = dict[str, str]


def read_xml(
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
        raise Broken(f"{name} is no XML ({error})") from None


def read_elements(data: bytes, name: str) -> list[tuple[str, Attributes]]:
    """Return the elements of a part in order, each by its name without the namespace."""
    found: list[tuple[str, Attributes]] = []
    read_xml(data, name, lambda tag, attributes: found.append((tag.rpartition(" ")[2], attributes)))
    return found
