"""Pages, documents and books become their exact text, in linear time and whatever a stranger wrote into them."""

import pytest

from lmlong.data.converters import Broken
from lmlong.data.converters.html import html_text
from lmlong.data.converters.office import docx_text, epub_text

from .made_documents import zipped


def test_pages_of_all_sorts() -> None:
    assert html_text(b"<p>one<p>two</div></p><b>x</b> y &lt; z") == "one\n\ntwo\n\nx y < z\n"
    assert html_text("<meta charset='windows-1251'><p>Да".encode("windows-1251")) == "Да\n"
    assert html_text("<p>naïve".encode("latin-1")) == "naïve\n"
    assert html_text("<p>Bären".encode("utf-16")) == "Bären\n"
    assert html_text(b"<html><head><title>x</title><body><p>open head</body>") == "open head\n"
    assert html_text(b"") == html_text(b"<script>1</script>") == ""
    assert (
        html_text(b"a < b <3 <a href='x>y'>c</a> <!-- d > e -->f<?g?><![CDATA[ > ]]>h<script/>i") == "a < b <3 c fhi\n"
    )
    assert html_text(b"<p>" + b"&#" + b"9" * 5000 + b"; x") == "\ufffd x\n"
    assert html_text(b"<meta charset=utf-16><p>x") == html_text(b"<meta charset=punycode><p>x") == "x\n"


@pytest.mark.parametrize("tag", ["svg", "math", "object", "noscript", "template", "iframe"])
def test_an_element_that_is_left_open_hides_nothing_else(tag: str) -> None:
    assert html_text(f"<p>one<{tag}>x</{tag}> two<p>three".encode()) == "one two\n\nthree\n"
    assert "two\n\nthree\n" in html_text(f"<p>one<{tag}><p>two<p>three<{tag}>x</{tag}>".encode())


@pytest.mark.parametrize(
    "part", ["<br>", "<a ", "<a x='", "<a x=", "<!--", "</a ", "<![CDATA[", "<?", "<!", "<svg>", "&#1", "<"]
)
def test_a_page_of_unfinished_markup_is_read_in_linear_time(part: str) -> None:
    """A quadratic reader takes hours for some of these."""
    assert len(html_text((part * (600_000 // len(part))).encode())) <= 600_001


WORD = (
    '<w:document xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main" '
    'xmlns:mc="http://schemas.openxmlformats.org/markup-compatibility/2006"><w:body>{}</w:body></w:document>'
)


def word(body: str, encoding: str = "utf-8", head: str = "") -> str:
    """The text of a DOCX of this body."""
    text = f'<?xml version="1.0" encoding="{encoding}"?>{head}{WORD.format(body)}'
    return docx_text(zipped({"word/document.xml": text.encode(encoding)}))


def paragraph(text: str) -> str:
    return f"<w:p><w:r><w:t>{text}</w:t></w:r></w:p>"


def table(*rows: list[str]) -> str:
    cells = ["".join(f"<w:tc>{cell}</w:tc>" for cell in row) for row in rows]
    return f"<w:tbl>{''.join(f'<w:tr>{row}</w:tr>' for row in cells)}</w:tbl>"


def test_nested_tables_and_text_boxes_of_a_docx_are_read_once() -> None:
    inner = table([paragraph("c"), paragraph("d")], [paragraph("e"), paragraph("")])
    outer = table([paragraph("a"), paragraph("b") + inner], [paragraph("f"), paragraph("g") + paragraph("h")])
    assert word(outer) == "a\tb c d e \nf\tg h\n"
    deep = paragraph("deep")
    for _ in range(60):
        deep = table([deep])
    assert word(deep) == "deep\n"
    with pytest.raises(Broken, match="inside each other"):
        word("<w:tbl><w:tr><w:tc>" * 3000 + "</w:tc></w:tr></w:tbl>" * 3000)
    box = f"<w:txbxContent>{paragraph('in a box')}{table([paragraph('x'), paragraph('y')])}</w:txbxContent>"
    choices = f"<mc:AlternateContent><mc:Choice>{box}</mc:Choice><mc:Fallback>{box}</mc:Fallback></mc:AlternateContent>"
    anchor = f"<w:p><w:r><w:t>an</w:t></w:r><w:r>{choices}</w:r><w:r><w:t>chor</w:t></w:r></w:p>"
    assert word(anchor + paragraph("end")) == "anchor\n\nin a box\n\nx\ty\n\nend\n"


def test_what_was_moved_deleted_or_is_a_property_is_no_text_of_a_docx() -> None:
    moved = "<w:moveFrom><w:r><w:t>moved</w:t></w:r></w:moveFrom>"
    stops = "<w:pPr><w:tabs><w:tab/></w:tabs></w:pPr>"
    deleted = "<w:del><w:r><w:delText>no</w:delText></w:r></w:del>"
    assert word(f"<w:p>{stops}{moved}{deleted}<w:r><w:t>a</w:t><w:tab/><w:t>b</w:t></w:r></w:p>") == "a\tb\n"
    assert word(paragraph("naïve"), "utf-16") == "naïve\n"


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "iso-8859-1"])
def test_declarations_that_multiply_a_text_are_refused_in_any_encoding(encoding: str) -> None:
    for inside in (f'<!ENTITY a "{"ha" * 500}">', '<!ATTLIST w:p a CDATA "x">', '<!ENTITY % b SYSTEM "file:///etc">'):
        with pytest.raises(Broken, match="declares entities"):
            word(paragraph("&a;" * 1000), encoding, f"<!DOCTYPE x [{inside}]>")


def test_a_page_that_a_book_lists_again_is_read_once() -> None:
    package = (
        '<package><manifest><item id="{}" href="p.html" media-type="text/html"/></manifest><spine>{}</spine></package>'
    )
    parts = {
        "META-INF/container.xml": b'<container><rootfile full-path="p.opf"/></container>',
        "p.opf": package.format("a", '<itemref idref="a"/>' * 99 + '<itemref/><itemref idref="none"/>').encode(),
        "p.html": b"<p>once",
    }
    assert epub_text(zipped(parts)) == "once\n"
