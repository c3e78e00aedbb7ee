"""Documents of other programs become their exact text; broken or hostile ones are counted with the reason."""

import bz2
import gzip
import lzma
import tarfile
from importlib.util import find_spec
from pathlib import Path

import pytest
import zstandard

from lmlong.data.converters import Broken
from lmlong.data.converters.html import html_text
from lmlong.data.converters.office import docx_text, epub_text
from lmlong.data.document import Document, ReadOptions, Skipped
from lmlong.data.formats import compression, converted
from lmlong.data.formats.compression import CHUNK
from lmlong.data.formats.table import DOCUMENT
from lmlong.data.sources import Source
from lmlong.errors import UsageError

from .made_documents import DOCX_TEXT, FASTA, FILES, KINDS, PAGE_TEXT, PDF_TEXT, epub, html, locked, pdf, tarred, zipped
from .test_corpus import files, texts

TEXTS = {
    "html": [PAGE_TEXT.format(title="Page")],
    "epub": ["\n".join(PAGE_TEXT.format(title=name) for name in "ba")],
    "docx": [DOCX_TEXT],
    "pdf": [PDF_TEXT],
    "fa": ["ACGTacgtNNACGT", "TTTTGG"],
    "zip": ["one", "two"],
    "tar.gz": ["one", "two"],
    "tar.xz": ["one", "two"],
}


def source(folder: Path, name: str, data: bytes, **options: object) -> Source:
    (folder / name).write_bytes(data)
    return files(folder / name, **options)


def skipped(found: Source) -> dict[str, str]:
    return {Path(each.name).name: each.reason for each in found.documents() if isinstance(each, Skipped)}


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_of_each_kind_becomes_its_text(tmp_path: Path, kind: str) -> None:
    if kind == "pdf":
        pytest.importorskip("pypdfium2")
    found = source(tmp_path, f"a.{kind}", KINDS[kind]())
    assert texts(found) == TEXTS[kind]
    assert texts(files(tmp_path)) == TEXTS[kind]  # in a folder too


COMPRESS = {"bz2": bz2.compress, "xz": lzma.compress, "gz": gzip.compress, "zst": zstandard.compress}
TRICKY = "\ufeffone\r\ntwo\rthree\n\0\u2028 ünï 中文 😀" * 9000


@pytest.mark.parametrize("suffix", COMPRESS)
def test_compressed_files_are_read_exactly_and_damaged_ones_reported(tmp_path: Path, suffix: str) -> None:
    compress = COMPRESS[suffix]
    data = compress(TRICKY.encode())
    (tmp_path / f"a.txt.{suffix}").write_bytes(data)
    pieces = list(Document.of_file(tmp_path / f"a.txt.{suffix}", "strict").pieces())
    assert "".join(pieces) == TRICKY and max(map(len, pieces)) <= 2 * CHUNK
    assert texts(source(tmp_path, f"a.fa.{suffix}", compress(FASTA[:30]) + compress(FASTA[30:]))) == TEXTS["fa"]
    for broken in (data[:-20], data[: len(data) // 2], b"no such file" * 9):
        with pytest.raises(UsageError, match=rf"b\.txt\.{suffix}: damaged or not a \.{suffix} file"):
            texts(source(tmp_path, f"b.txt.{suffix}", broken))
    (tmp_path / f"c.txt.{suffix}").write_bytes(compress(b"x" * 3 * CHUNK + b"\xff" + b"y" * CHUNK))
    with pytest.raises(UsageError, match=rf"c.txt.{suffix}: byte {3 * CHUNK} is not UTF-8.*text.errors=replace"):
        list(Document.of_file(tmp_path / f"c.txt.{suffix}", "strict").pieces())


def test_what_unpacks_to_too_much_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("HARMLESS", 1 << 20), ("RATIO", 100)):
        monkeypatch.setattr(compression, name, value)
    zeros = bytes(2 << 20)
    with pytest.raises(UsageError, match="expands to more than"):
        texts(source(tmp_path, "a.txt.bz2", bz2.compress(zeros)))
    bomb = zipped({"good.txt": b"good", **{f"{n}.txt": zeros for n in range(4)}})
    found = source(tmp_path, "a.zip", bomb)
    assert any("times its size" in reason for reason in skipped(found).values())
    hidden = {**{f"{n}.png": zeros for n in range(4)}, "last.txt": b"not reached"}
    for name, data in {"b.zip": zipped(hidden), "b.tgz": tarred(hidden)}.items():
        found = source(tmp_path, name, data)
        assert texts(found) == []
        assert any("times its size" in reason for reason in skipped(found).values())


@pytest.mark.parametrize("type", [tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE, tarfile.REGTYPE])
def test_headers_of_an_archive_are_bounded(tmp_path: Path, type: bytes) -> None:
    header = tarfile.TarInfo("long.txt")
    header.type, header.size = type, 3 << 30  # a hundred kilobytes, compressed
    data = gzip.compress(header.tobuf(tarfile.GNU_FORMAT) + bytes(1 << 20))
    assert any("header" in r or "times its size" in r for r in skipped(source(tmp_path, "a.tgz", data)).values())


def test_files_of_an_archive_are_read_or_counted_with_the_reason(tmp_path: Path) -> None:
    reasons = {"c.png": "inside an archive only plain text is read", "d.txt": "hidden", "empty.txt": "empty"}
    for name, data in {"a.zip": zipped(FILES), "a.tgz": tarred(FILES), "b.tar": tarred(FILES, "w")}.items():
        found = source(tmp_path, name, data)
        skipped_files = skipped(found)
        assert skipped_files.keys() == reasons.keys()  # a link leads nowhere
        assert all(skipped_files[each].startswith(reason) for each, reason in reasons.items())
        places = [each.fields for each in found.documents() if isinstance(each, Document)]
        assert places == [{"file": "a.txt", "folder": ""}, {"file": "b.md", "folder": "below"}]


def test_a_file_that_is_not_an_archive_is_skipped_with_the_reason(tmp_path: Path) -> None:
    assert "a damaged archive" in skipped(source(tmp_path, "no.zip", b"PK no"))["no.zip"]
    whole = tarred({"a.txt": b"one" * 9999}, "w")
    assert "a damaged archive" in skipped(source(tmp_path, "cut.tar", whole[:9000]))["cut.tar"]
    assert skipped(source(tmp_path, "locked.zip", locked(zipped({"a.txt": b"one"})))) == {"a.txt": "encrypted"}
    bad = source(tmp_path, "bad.zip", zipped({"a.txt": b"\xff\x00\x81 no text", "b.txt": b"yes"}))
    assert texts(bad) == ["yes"] and "text.encoding" in skipped(bad)["a.txt"]


def test_fasta_is_checked_and_masks_are_kept_or_not(tmp_path: Path) -> None:
    assert texts(source(tmp_path, "a.fa", FASTA, soft_masks="upper")) == ["ACGTACGTNNACGT", "TTTTGG"]
    found = [each for each in files(tmp_path / "a.fa").documents() if isinstance(each, Document)]
    assert [each.name for each in found] == [f"{tmp_path / 'a.fa'}:chr1", f"{tmp_path / 'a.fa'}:chr2"]
    assert [each.fields for each in found] == [{"header": "chr1 the first"}, {"header": "chr2"}]
    kept, upper = (files(tmp_path / "a.fa", soft_masks=masks).fingerprint for masks in ("keep", "upper"))
    assert kept != upper
    long = b">one\n" + b"ACGT" * 100_000 + b"\n>two\nA"  # a line longer than a chunk
    assert [len(text) for text in texts(source(tmp_path, "long.fa", long))] == [400_000, 1]
    for data, wrong in ((b">a\nAC\nA7\n", r"a\.fa:3: '7' is not a code"), (b"ACGT\n", r"a\.fa:1: a sequence before")):
        with pytest.raises(UsageError, match=wrong):
            texts(source(tmp_path, "a.fa", data))


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
    assert len(html_text((part * (1_000_000 // len(part))).encode())) <= 1_000_001


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


def test_what_cannot_be_converted_is_counted_with_the_reason(tmp_path: Path) -> None:
    laughs = b'<?xml version="1.0"?><!DOCTYPE x [<!ENTITY a "ha"><!ENTITY b "&a;&a;">]><x>&b;</x>'
    cases = {
        "no.docx": (b"no zip", "no ZIP archive"),
        "empty.docx": (zipped({"x": b""}), "it has no word/document.xml"),
        "laughs.docx": (zipped({"word/document.xml": laughs}), "declares entities"),
        "broken.epub": (zipped({"META-INF/container.xml": b"<x"}), "is not valid XML"),
        "blank.html": (b"<p> </p>", "no text in it"),
        "locked.epub": (locked(epub()), "encrypted"),
    }
    if find_spec("pypdfium2"):
        cases["locked.pdf"] = (pdf(password="secret"), "encrypted")
    for name, (data, reason) in cases.items():
        assert reason in skipped(source(tmp_path, name, data))[name]


def test_a_document_that_takes_too_long_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slow.docx").symlink_to("/dev/zero")  # never ends
    with monkeypatch.context() as patch:
        patch.setattr(converted, "SECONDS", 1.0)
        assert isinstance(*DOCUMENT.documents(tmp_path / "slow.docx", ReadOptions()), Skipped)
    assert texts(source(tmp_path, "good.html", html())) == TEXTS["html"]


def test_a_document_is_converted_once_though_it_is_read_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = source(tmp_path, "a.epub", epub())
    requests: list[object] = []
    ask = converted.PROCESS.ask
    monkeypatch.setattr(converted.PROCESS, "ask", lambda *request: requests.append(request) or ask(*request))
    (document,) = found.documents()
    assert isinstance(document, Document)
    assert document.measure().bytes == sum(len(piece.encode()) for piece in document.pieces())
    assert len(requests) == 1
