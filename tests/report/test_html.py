"""Elements, tables and pages: well formed, escaped, and in need of nothing else."""

import re
from html.parser import HTMLParser

from lmlong.report.html import Html, data_table, details, element, escaped, page
from lmlong.report.report import Table
from lmlong.report.table import Column

ATTACK = "<script>alert(1)</script>\"'&"


class Outline(HTMLParser):
    """The elements of a page, which must be closed in the order in which they were opened, and its text."""

    def __init__(self, page: str):
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] != ["style"]:
            self.text += data


def test_text_and_attributes_are_escaped_and_html_is_not() -> None:
    outline = Outline(element("p", ATTACK, Html("<b>bold</b>"), title=ATTACK, class_="a", aria_label=None))
    assert outline.elements == [("p", {"title": ATTACK, "class": "a"}), ("b", {})]
    assert outline.text == ATTACK + "bold"


def test_what_cannot_be_shown_is_replaced() -> None:
    bad = ("\x00", "\x1b", "\x7f", "\x9b", "\u202e", "\u2066", "\ud800", "\x0b")
    assert {escaped(f"a{each}b\n\té\u200d") for each in bad} == {"a\ufffdb\n\té\u200d"}


def test_a_table_names_its_rows_and_columns() -> None:
    columns = [Column("", 0, align="<"), Column("loss", 0, ".2f"), Column("run", 0, align="<")]
    outline = Outline(data_table(Table("Losses", columns, [["a", 1.234, ATTACK], ["b", None, "c"]])))
    scopes = [attributes.get("scope") for tag, attributes in outline.elements if tag == "th"]
    assert scopes == ["col", "col", "row", "row"]
    assert outline.text == f"Losseslossruna1.23{ATTACK}bc"


def test_a_page_links_to_its_sections_and_to_nothing_else() -> None:
    made = page(ATTACK, [element("p", "intro")], {"One & two": [details("more", "x")], "Three": ["y"]}, "end")
    outline = Outline(made)
    ids = [attributes["id"] for _, attributes in outline.elements if "id" in attributes]
    assert ids == ["one-two", "three"]
    assert [attributes["href"] for tag, attributes in outline.elements if tag == "a"] == ["#one-two", "#three"]
    assert [tag for tag, _ in outline.elements if tag in ("h1", "h2")] == ["h1", "h2", "h2"]
    assert not {"script", "link", "img", "iframe"} & {tag for tag, _ in outline.elements}
    assert not re.search(r"https?:|url\(|@import| on\w+=| src=", made)
    (policy,) = [a["content"] for tag, a in outline.elements if a.get("http-equiv") == "Content-Security-Policy"]
    assert policy and policy.startswith("default-src 'none'; style-src 'unsafe-inline'")
