"""Documents of others become their text exactly, and broken or hostile ones a count with the reason."""

import bz2
import gzip
import lzma
import random
import time
from pathlib import Path

import pytest

from lmlong.data import archives, documents, reading
from lmlong.data.converters.html import html_text
from lmlong.data.documents import ConversionError, Converter
from lmlong.data.reading import Document, Skipped
from lmlong.data.sources import Source
from lmlong.errors import UsageError

from .made_documents import DOCX_TEXT, FASTA, FILES, KINDS, PAGE_TEXT, PDF_TEXT, epub, html, tarred, zipped
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


@pytest.mark.parametrize("suffix", ["bz2", "xz", "gz"])
def test_compressed_files_are_read_and_damaged_ones_told(tmp_path: Path, suffix: str) -> None:
    data = {"bz2": bz2.compress, "xz": lzma.compress, "gz": gzip.compress}[suffix](b"a dark night\n" * 999)
    assert texts(source(tmp_path, f"a.txt.{suffix}", data)) == ["a dark night\n" * 999]
    assert texts(source(tmp_path, f"a.fa.{suffix}", {"bz2": bz2, "xz": lzma, "gz": gzip}[suffix].compress(FASTA)))
    for broken in (data[:-20], b"no such file" * 9):
        with pytest.raises(UsageError, match=rf"damaged or not a \.{suffix} file"):
            texts(source(tmp_path, f"b.txt.{suffix}", broken))


def test_what_unpacks_to_too_much_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (reading, archives):
        monkeypatch.setattr(module, "HARMLESS", 1 << 20)
        monkeypatch.setattr(module, "RATIO", 100)
    zeros = bytes(2 << 20)
    with pytest.raises(UsageError, match="unpacks to more than"):
        texts(source(tmp_path, "a.txt.bz2", bz2.compress(zeros)))
    bomb = zipped({"good.txt": b"good", **{f"{n}.txt": zeros for n in range(4)}})
    found = source(tmp_path, "a.zip", bomb)
    assert any("times its size" in reason for reason in skipped(found).values())


def test_files_of_an_archive_are_read_or_counted_with_the_reason(tmp_path: Path) -> None:
    reasons = {"c.png": "inside an archive only plain text is read", "d.txt": "hidden", "empty.txt": "empty"}
    for name, data in {"a.zip": zipped(FILES), "a.tgz": tarred(FILES), "b.tar": tarred(FILES, "w")}.items():
        found = source(tmp_path, name, data)
        told = skipped(found)
        assert told.keys() == reasons.keys()  # a link leads nowhere
        assert all(told[each].startswith(reason) for each, reason in reasons.items())
        places = [each.fields for each in found.documents() if isinstance(each, Document)]
        assert places == [{"file": "a.txt", "folder": ""}, {"file": "b.md", "folder": "below"}]


def test_an_archive_may_not_be_what_it_says(tmp_path: Path) -> None:
    assert "a damaged archive" in skipped(source(tmp_path, "no.zip", b"PK no"))["no.zip"]
    whole = tarred({"a.txt": b"one" * 9999}, "w")
    assert "a damaged archive" in skipped(source(tmp_path, "cut.tar", whole[:9000]))["cut.tar"]
    locked = bytearray(zipped({"a.txt": b"one"}))
    for signature, place in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):  # the flag of encryption
        locked[locked.index(signature) + place] |= 1
    assert skipped(source(tmp_path, "locked.zip", bytes(locked))) == {"a.txt": "encrypted"}
    with pytest.raises(UsageError, match=r"bad\.zip/a\.txt: byte 0 is not UTF-8"):
        texts(source(tmp_path, "bad.zip", zipped({"a.txt": b"\xff\x00\x81 no text"})))


def test_fasta_is_checked_and_masks_are_kept_or_not(tmp_path: Path) -> None:
    assert texts(source(tmp_path, "a.fa", FASTA, soft_masks="upper")) == ["ACGTACGTNNACGT", "TTTTGG"]
    found = [each for each in files(tmp_path / "a.fa").documents() if isinstance(each, Document)]
    assert [each.name for each in found] == [f"{tmp_path / 'a.fa'}:chr1", f"{tmp_path / 'a.fa'}:chr2"]
    assert [each.fields for each in found] == [{"header": "chr1 the first"}, {"header": "chr2"}]
    kept, upper = (files(tmp_path / "a.fa", soft_masks=masks).fingerprint for masks in ("keep", "upper"))
    assert kept != upper
    long = b">one\n" + b"ACGT" * 100_000 + b"\n>two\nA"  # a line longer than a chunk
    assert [len(text) for text in texts(source(tmp_path, "long.fa", long))] == [400_000, 1]
    for data, wrong in ((b">a\nAC\nA7\n", r"a\.fa:3: '7' is no letter"), (b"ACGT\n", r"a\.fa:1: a sequence before")):
        with pytest.raises(UsageError, match=wrong):
            texts(source(tmp_path, "a.fa", data))


def test_pages_of_all_sorts() -> None:
    assert html_text(b"<p>one<p>two</div></p><b>x</b> y &lt; z") == "one\n\ntwo\n\nx y < z\n"
    assert html_text("<meta charset='windows-1251'><p>Да".encode("windows-1251")) == "Да\n"
    assert html_text("<p>naïve".encode("latin-1")) == "naïve\n"
    assert html_text("<p>Bären".encode("utf-16")) == "Bären\n"
    assert html_text(b"<html><head><title>x</title><body><p>open head</body>") == "open head\n"
    assert html_text(b"") == html_text(b"<script>1</script>") == ""


def test_what_cannot_be_converted_is_counted_with_the_reason(tmp_path: Path) -> None:
    laughs = b'<?xml version="1.0"?><!DOCTYPE x [<!ENTITY a "ha"><!ENTITY b "&a;&a;">]><x>&b;</x>'
    cases = {
        "no.docx": (b"no zip", "no ZIP archive"),
        "empty.docx": (zipped({"x": b""}), "it has no word/document.xml"),
        "laughs.docx": (zipped({"word/document.xml": laughs}), "declares entities"),
        "broken.epub": (zipped({"META-INF/container.xml": b"<x"}), "is no XML"),
        "blank.html": (b"<p> </p>", "no text in it"),
    }
    for name, (data, reason) in cases.items():
        assert reason in skipped(source(tmp_path, name, data))[name]


def test_a_document_that_takes_too_long_or_ends_the_program_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "good.html").write_bytes(html())
    (tmp_path / "slow.docx").symlink_to("/dev/zero")  # never ends
    monkeypatch.setattr(documents, "SECONDS", 1.0)
    converter = Converter()
    begun = time.monotonic()
    with pytest.raises(ConversionError):
        converter.convert(tmp_path / "slow.docx", ".docx")
    assert time.monotonic() - begun < 30
    assert converter.convert(tmp_path / "good.html", ".html").decode() == TEXTS["html"][0]
    process = converter._process._process
    assert process
    process.kill()
    process.wait()
    assert converter.convert(tmp_path / "good.html", ".html").decode() == TEXTS["html"][0]
    converter.close()


def test_a_document_is_converted_once_though_it_is_read_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = source(tmp_path, "a.epub", epub())
    asked: list[Path] = []
    original = documents.CONVERTER.convert
    monkeypatch.setattr(documents.CONVERTER, "convert", lambda *about: asked.append(about[0]) or original(*about))
    (document,) = found.documents()
    assert isinstance(document, Document) and document.measure().bytes == sum(
        len(p.encode()) for p in document.pieces()
    )
    assert len(asked) == 1


def mutated(data: bytes, draw: random.Random) -> bytes:
    """A file that was damaged: bits flipped, cut, a part repeated, a part left out."""
    changed = bytearray(data)
    for _ in range(draw.randint(1, 8)):
        place, size = draw.randrange(len(changed)), draw.randint(1, 40)
        match draw.randrange(4):
            case 0:
                changed[place] ^= 1 << draw.randrange(8)
            case 1:
                del changed[place : place + size]
            case 2:
                changed[place:place] = changed[place : place + size]
            case 3:
                del changed[max(place, 20) :]
        if not changed:
            break
    return bytes(changed) or b"x"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("times", [6, pytest.param(100, marks=pytest.mark.slow)])
def test_damaged_files_are_read_or_told(tmp_path: Path, kind: str, times: int) -> None:
    data, draw = KINDS[kind](), random.Random(kind)
    for number in range(times):
        begun = time.monotonic()
        found = source(tmp_path, f"{number}.{kind}", mutated(data, draw))
        try:
            for each in found.documents():
                if isinstance(each, Document):
                    each.measure()
                else:
                    assert each.reason and "Traceback" not in each.reason
        except UsageError as error:
            assert str(number) in str(error)
        assert time.monotonic() - begun < 30


def test_zip_of_zip_is_left_out(tmp_path: Path) -> None:
    found = source(tmp_path, "a.zip", zipped({"b.zip": zipped({"c.txt": b"no"}), "a.txt": b"yes"}))
    assert texts(found) == ["yes"]
    assert skipped(found).keys() == {"b.zip"}
