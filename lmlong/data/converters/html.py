"""HTML and XHTML -> text: paragraphs with a blank line between them, items and rows with a line each."""

import re
from codecs import BOM_UTF8
from html.parser import HTMLParser

from lmlong.data.encoding import marked

LEFT_OUT = {"script", "style", "template", "head", "noscript", "svg", "math", "iframe", "object"}
PARAGRAPHS = {
    *("address", "article", "aside", "blockquote", "body", "details", "dialog", "div", "dl", "fieldset", "figcaption"),
    *("figure", "footer", "form", "h1", "h2", "h3", "h4", "h5", "h6", "header", "hr", "html", "main", "nav", "ol", "p"),
    *("pre", "section", "summary", "table", "ul"),
}
LINES = {"br", "dd", "dt", "li", "option", "tr", "caption", "legend"}
CELLS = {"td", "th"}

SPACE = re.compile(r"[ \t\n\f\r]+")
CHARSET = re.compile(rb"""charset\s*=\s*["']?\s*([\w-]+)|<\?xml[^>]*encoding\s*=\s*["']([\w-]+)""", re.IGNORECASE)

BEGINNING = 4096
"""Bytes in which a page names its encoding."""


class TextParser(HTMLParser):
    """Collects the text of a page; tags that are left open or closed twice do no harm."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self._parts: list[str] = []
        self._hidden: list[str] = []
        self._pre = 0
        self._owed = ""  # line ends and space before the next word

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        if tag == "body":  # a head that nobody closed hides nothing more
            self._hidden.clear()
        if tag in LEFT_OUT:
            self._hidden.append(tag)
        self._break(tag)
        self._pre += tag == "pre"

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self._break(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in self._hidden:
            while self._hidden.pop() != tag:
                pass
        self._break(tag, closes=True)
        self._pre -= tag == "pre" and self._pre > 0

    def handle_data(self, data: str) -> None:
        if self._hidden:
            return
        if self._pre:
            self._put(data)
            return
        for number, word in enumerate(SPACE.split(data)):
            if number and not self._owed:
                self._owed = " "
            if word:
                self._put(word)

    def text(self) -> str:
        """Return the text so far, with one line end at its end."""
        text = "".join(self._parts).strip("\n")
        return text + "\n" if text else ""

    def _put(self, data: str) -> None:
        if self._parts or self._owed != " ":
            self._parts.append(self._owed)
        self._owed = ""
        self._parts.append(data)

    def _break(self, tag: str, closes: bool = False) -> None:
        if tag in PARAGRAPHS:
            self._owe("\n\n")
        elif tag in LINES:
            self._owe("\n" if tag != "br" or closes else self._owed.rstrip(" ") + "\n")
        elif tag in CELLS and not closes and self._parts and "\n" not in self._owed:
            self._owed = "\t"

    def _owe(self, ends: str) -> None:
        if self._owed.count("\n") < ends.count("\n"):
            self._owed = ends


def html_text(data: bytes) -> str:
    """Return the text of a page."""
    parser = TextParser()
    parser.feed(_decoded(data))
    parser.close()
    return parser.text()


def _decoded(data: bytes) -> str:
    """Return a page as a string, in the encoding of its byte order mark, that it names, or UTF-8, else Western."""
    if mark := marked(data):
        return data.decode(mark, "replace")
    named = CHARSET.search(data[:BEGINNING])
    wanted = (named[1] or named[2]).decode("ascii", "replace") if named else "utf-8"
    try:
        return data.removeprefix(BOM_UTF8).decode(wanted)
    except (LookupError, UnicodeDecodeError, ValueError):
        return data.decode("windows-1252", "replace")
