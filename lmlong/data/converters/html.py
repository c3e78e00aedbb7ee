"""Convert HTML and XHTML to text: a blank line between paragraphs, a line for each item and row."""

import codecs
import re
from codecs import BOM_UTF8
from collections import Counter
from html import unescape
from typing import NamedTuple

from lmlong.data.converters.html_tokens import Tag, tokens
from lmlong.data.encoding import UTF8, marked

LEFT_OUT = {"script", "style", "template", "head", "noscript", "svg", "math", "iframe", "object"}
PARAGRAPHS = {
    *("address", "article", "aside", "blockquote", "body", "details", "dialog", "div", "dl", "fieldset", "figcaption"),
    *("figure", "footer", "form", "h1", "h2", "h3", "h4", "h5", "h6", "header", "hr", "html", "main", "nav", "ol", "p"),
    *("pre", "section", "summary", "table", "ul"),
}
LINES = {"br", "dd", "dt", "li", "option", "tr", "caption", "legend"}
CELLS = {"td", "th"}

IN_HEAD = {"base", "link", "meta", "noscript", "script", "style", "template", "title"}
"""The elements of a head; the start tag of any other one closes it."""
DRAWINGS = {"svg", "math"}
"""Elements of other languages, which the start tag of an HTML element closes, as the HTML standard defines."""
IN_TEXT = {"b", "center", "code", "em", "i", "img", "small", "span", "strong", "sub", "sup", "u"}
CLOSE_DRAWINGS = PARAGRAPHS | LINES | IN_TEXT

SPACE = re.compile(r"[ \t\n\f\r]+")
LONG_REFERENCE = re.compile(r"&#(?:[xX][0-9a-fA-F]{64,}|[0-9]{64,});?")
"""A character reference with more digits than any character has; Python refuses to read those of thousands."""
CHARSET = re.compile(rb"""charset\s*=\s*["']?\s*([\w-]+)|<\?xml[^>]*encoding\s*=\s*["']([\w-]+)""", re.IGNORECASE)

NOT_OF_PAGES = {"idna", "punycode", "raw-unicode-escape", "undefined", "unicode-escape", "utf-7"}
"""Codecs of Python that no page is written in; some take quadratic time."""

MOST_LINE_ENDS = 100
"""Line ends in a row that are kept of those that a page has."""

BEGINNING = 4096
"""Bytes in which a page names its encoding."""


class LeftOut(NamedTuple):
    """An open element of LEFT_OUT, and the text before it, which is restored when the element is closed."""

    tag: str
    parts: int
    owed: str
    pre: int


class PageText:
    """Collects the text of a page. A tag that is left open or closed twice hides no other text."""

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._left_out: list[LeftOut] = []
        self._open = Counter[str]()  # tags of `_left_out`
        self._pre = 0
        self._owed = ""  # line ends and space before the next word

    def tag(self, tag: Tag) -> None:
        """Read a tag."""
        if tag.closes:
            if self._open[tag.name]:
                self._drop(tag.name)
        elif not tag.is_empty:
            self._start(tag.name)
        self._break(tag.name, tag.closes)
        if tag.name == "pre" and not tag.is_empty:
            self._pre = max(0, self._pre - 1) if tag.closes else self._pre + 1

    def data(self, data: str) -> None:
        """Read the text between two tags."""
        data = unescape(LONG_REFERENCE.sub("\ufffd", data))
        if self._pre:
            self._put(data)
            return
        for number, word in enumerate(SPACE.split(data)):
            if number and not self._owed:
                self._owed = " "
            if word:
                self._put(word)

    def text(self) -> str:
        """Return the text of the whole page, with one line end at its end."""
        if self._open["head"]:
            self._drop("head")
        text = "".join(self._parts).strip("\n")
        return text + "\n" if text else ""

    def _start(self, tag: str) -> None:
        if self._open["head"] and tag not in IN_HEAD:
            self._drop("head")
        if tag in CLOSE_DRAWINGS:
            while self._left_out and self._left_out[-1].tag in DRAWINGS:
                self._drop(self._left_out[-1].tag)
        if tag in LEFT_OUT:
            self._left_out.append(LeftOut(tag, len(self._parts), self._owed, self._pre))
            self._open[tag] += 1

    def _drop(self, tag: str) -> None:
        """Close the innermost element of this name, and those inside it, and leave out their text."""
        element = None
        while element is None or element.tag != tag:
            element = self._left_out.pop()
            self._open[element.tag] -= 1
        del self._parts[element.parts :]
        self._owed, self._pre = element.owed, element.pre

    def _put(self, data: str) -> None:
        if self._parts or self._owed != " ":
            self._parts.append(self._owed)
        self._owed = ""
        self._parts.append(data)

    def _break(self, tag: str, closes: bool) -> None:
        if tag in PARAGRAPHS:
            self._owe("\n\n")
        elif tag in LINES:
            self._owe("\n" if tag != "br" or closes else self._owed.rstrip(" ") + "\n")
        elif tag in CELLS and not closes and self._parts and "\n" not in self._owed:
            self._owed = "\t"

    def _owe(self, ends: str) -> None:
        if self._owed.count("\n") < min(ends.count("\n"), MOST_LINE_ENDS):
            self._owed = ends


def html_text(data: bytes) -> str:
    """Return the text of a page."""
    page = PageText()
    for token in tokens(_decoded(data)):
        if isinstance(token, Tag):
            page.tag(token)
        else:
            page.data(token)
    return page.text()


def _decoded(data: bytes) -> str:
    """Return a page as a string, in the encoding of its byte order mark, that it names, or UTF-8, else Western."""
    if mark := marked(data):
        return data.decode(mark, "replace")
    named = CHARSET.search(data[:BEGINNING])
    try:
        return data.removeprefix(BOM_UTF8).decode(_codec((named[1] or named[2]).decode("ascii")) if named else UTF8)
    except (LookupError, ValueError):
        return data.decode("windows-1252", "replace")


def _codec(name: str) -> str:
    """Return the codec for the encoding that a page names. A page whose name could be read is not UTF-16."""
    codec = codecs.lookup(name).name
    if codec in NOT_OF_PAGES:
        raise LookupError(name)
    return UTF8 if codec.startswith(("utf-16", "utf-32")) else codec
