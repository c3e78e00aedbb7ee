"""HTML in one file: elements whose text is escaped, tables of columns, and a page with its style.

A page refers to nothing outside it, and its policy forbids scripts and requests, whatever it contains.
"""

import re
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from lmlong.report.figure import COLORS, DARK_COLORS
from lmlong.report.report import Table
from lmlong.report.table import cell_texts

STYLE = Path(__file__).with_name("page.css")
POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters, characters that reorder a text, and halves of surrogate pairs."""


class Html(str):
    """Text that is HTML already, and is not escaped again."""


def escaped(text: str) -> Html:
    """Return text as HTML; characters that cannot be shown are replaced."""
    return text if isinstance(text, Html) else Html(escape(UNSAFE.sub("\ufffd", text)))


def join(parts: Iterable[str]) -> Html:
    """Return parts of a page, of which plain text is escaped."""
    return Html("".join(map(escaped, parts)))


def element(name: str, /, *children: str, **attributes: Any) -> Html:
    """Return an element; `class_` and `aria_label` are the attributes class and aria-label, and None is left out."""
    given = {key.rstrip("_").replace("_", "-"): value for key, value in attributes.items() if value is not None}
    begin = "".join([name, *(f' {key}="{escaped(str(value))}"' for key, value in given.items())])
    return Html(f"<{begin}>" if name == "meta" else f"<{begin}>{join(children)}</{name}>")


def data_table(table: Table) -> Html:
    """Return a table with its title as caption. The first column names the rows."""
    texts = [cell_texts(table.columns, row) for row in table.rows]
    sides = ["text" if column.align == "<" else None for column in table.columns]
    titles = zip(table.columns, sides, strict=True)
    head = [_title(column.title, side) for column, side in titles]
    lines = [element("tr", element("th", first, scope="row"), *map(_cell, rest, sides[1:])) for first, *rest in texts]
    caption, body = element("caption", table.title), element("tbody", *lines)
    shown = element("table", caption, element("thead", element("tr", *head)), body)
    return element("div", shown, class_="scroll", tabindex=0, role="group", aria_label=table.title)


def _title(text: str, side: str | None) -> Html:
    return element("th", text, scope="col", class_=side) if text else element("td")


def _cell(text: str, side: str | None) -> Html:
    return element("td", text, class_=side)


def details(summary: str, *children: str, class_: str | None = None) -> Html:
    """Return content that is shown when its summary is clicked."""
    return element("details", element("summary", summary), *children, class_=class_)


def section(title: str, *children: str) -> Html:
    """Return a section with its heading, to which `page` links."""
    name = re.sub(r"\W+", "-", title.lower())
    return element("section", element("h2", title, id=name), *children, aria_labelledby=name)


def page(title: str, intro: Sequence[str], sections: dict[str, Sequence[str]], footer: str) -> Html:
    """Return a whole page of sections with links to them."""
    parts = [section(name, *children) for name, children in sections.items()]
    links = [element("li", element("a", name, href="#" + re.sub(r"\W+", "-", name.lower()))) for name in sections]
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=POLICY),
        element("meta", name="viewport", content="width=device-width"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", title),
        Html(f"<style>{_colors(COLORS)}@media screen and (prefers-color-scheme:dark){{{_colors(DARK_COLORS)}}}"),
        Html(STYLE.read_text(encoding="utf-8") + "</style>"),
    )
    body = element(
        "body",
        element("header", element("h1", title), *intro),
        element("nav", element("ul", *links), aria_label="Contents"),
        element("main", *parts),
        element("footer", element("p", footer)),
    )
    return Html(f"<!doctype html>\n{element('html', head, body, lang='en')}\n")


def _colors(colors: Sequence[str]) -> str:
    return ":root{" + "".join(f"--c{number}:{color};" for number, color in enumerate(colors)) + "}"
