"""Split an HTML page into tags and text, in linear time whatever the page holds.

Python's `html.parser` takes quadratic time for some pages, and its result depends on the version of Python. This
follows the tokenizer of the HTML standard, but drops attributes, which contain no text.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

NAME = re.compile(r"[a-zA-Z][^\s/>]*")
TAG_SIGN = re.compile(r"[>=]")
QUOTE = re.compile(r"""\s*(["'])""")
COMMENT_END = re.compile(r"--!?>")
RAW = {name: re.compile(rf"</{name}(?=[\s/>])", re.IGNORECASE) for name in ("script", "style")}
"""Elements whose content is neither tags nor text, with what ends it."""


class Tag(NamedTuple):
    name: str  # in lower case
    closes: bool
    is_empty: bool  # ends in />


def tokens(page: str) -> Iterator[Tag | str]:
    """Iterate over the tags of a page and the text between them, its character references as they are."""
    last_cdata_end = page.rfind("]]>")
    text = at = 0  # where the text begins, and where the next < is searched
    while (sign := page.find("<", at)) >= 0:
        end, tag = _markup(page, sign, last_cdata_end)
        if end == sign:
            at = sign + 1
            continue
        if text < sign:
            yield page[text:sign]
        if tag:
            yield tag
            if tag.name in RAW and not tag.closes and not tag.is_empty:
                closing = RAW[tag.name].search(page, end)
                end = closing.start() if closing else len(page)
        text = at = end
    if text < len(page):
        yield page[text:]


def _markup(page: str, sign: int, last_cdata_end: int) -> tuple[int, Tag | None]:
    """Return the end of the markup that begins at a <, and its tag. If the < is text, return its own position. Unclosed
    markup ends with the page."""
    closes = page.startswith("/", sign + 1)
    if name := NAME.match(page, sign + 1 + closes):
        end = _tag_end(page, name.end())
        # a tag that is cut off by the end of the page does not count
        tag = Tag(name[0].lower(), closes, page.startswith("/", end - 2)) if page[end - 1] == ">" else None
        return end, tag
    if page.startswith("!--", sign + 1):
        comment = COMMENT_END.search(page, sign + 2)
        return (comment.end() if comment else len(page)), None
    if page.startswith("![CDATA[", sign + 1) and last_cdata_end > sign:
        return page.index("]]>", sign) + len("]]>"), None
    if page.startswith(("!", "?", "/"), sign + 1):
        return (page.find(">", sign) + 1 or len(page)), None
    return sign, None


def _tag_end(page: str, at: int) -> int:
    """Return the end of a tag whose attributes begin at `at`. A > inside a quoted value does not end it."""
    while sign := TAG_SIGN.search(page, at):
        at = sign.end()
        if sign[0] == ">":
            return at
        if quote := QUOTE.match(page, at):
            at = page.find(quote[1], quote.end()) + 1
            if not at:
                break
    return len(page)
