"""Every format of files by one table: the bytes of a file, and the documents that they become or why there are none."""

import bz2
import gzip
import json
import lzma
import re
import tarfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pyarrow
import pytest
import zstandard
from pyarrow.parquet import write_table

from lmlong import recipe
from lmlong.data import sources
from lmlong.data.document import Document, ReadOptions, Skipped
from lmlong.data.formats import compression, converted
from lmlong.data.formats.compression import CHUNK, COMPRESSED
from lmlong.data.formats.table import DOCUMENT, FORMATS, UNKNOWN, format_of
from lmlong.data.sources import check_quickly
from lmlong.errors import UsageError

from . import made_documents as made
from .conftest import files, skipped, texts


class Case(NamedTuple):
    """A file, and its texts, the reasons for what is skipped in it, or the error that names it."""

    data: bytes | Callable[[], bytes]
    texts: Sequence[str] = ()
    skipped: Mapping[str, str] = MappingProxyType({})
    error: str = ""
    seen_at_once: bool = False  # by the quick look before the text is opened


def lines(*rows: dict[str, Any]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def parquet(*rows: dict[str, Any]) -> bytes:
    return made.saved(partial(write_table, pyarrow.Table.from_pylist(rows)))


ROWS = ({"text": "one\r\n\n", "n": 1}, {"text": None, "n": 2}, {"text": "", "n": 3}, {"text": "中\u2028", "n": 4})
RECORDS = {
    **{"a.jsonl": lines(*ROWS), "A.NDJSON": lines(*ROWS), "a.json": json.dumps(ROWS).encode()},
    **{"a.jsonl.gz": gzip.compress(lines(*ROWS)), "a.jsonl.zst": zstandard.compress(lines(*ROWS))},
    "a.parquet": parquet(*ROWS),
}
WRONG_COLUMN = "no column 'text', only txt. Set column. Did you mean 'txt'?"
NOT_RECORDS = "`datasets` cannot read it"

DOCUMENTS = {
    "html": [made.PAGE_TEXT.format(title="Page")],
    "epub": ["\n".join(made.PAGE_TEXT.format(title=name) for name in "ba")],
    "docx": [made.DOCX_TEXT],
    "pdf": [made.PDF_TEXT],
    "fa": ["ACGTacgtNNACGT", "TTTTGG"],
}
NOT_IN_ARCHIVES = {"c.png": "^inside an archive only plain text is read", "d.txt": "^hidden", "empty.txt": "^empty"}
ARCHIVES = {
    **{f"a.{kind}": made.KINDS[kind]() for kind in ("zip", "tar.gz", "tar.xz")},
    **{"a.tgz": made.tarred(made.FILES), "b.tar": made.tarred(made.FILES, "w")},
}
CUT_TAR = made.tarred({"a.txt": b"one" * 9999}, "w")[:9000]
LAUGHS = b'<?xml version="1.0"?><!DOCTYPE x [<!ENTITY a "ha"><!ENTITY b "&a;&a;">]><x>&b;</x>'

COMPRESS = {"bz2": bz2.compress, "xz": lzma.compress, "gz": gzip.compress, "zst": zstandard.compress}
TRICKY = "\ufeffone\r\ntwo\rthree\n\0\u2028 ünï 中文 😀" * 9000


def compressed(suffix: str, compress: Callable[[bytes], bytes]) -> dict[str, Case]:
    data = compress(TRICKY.encode())
    broken = {"cut": data[:-20], "half": data[: len(data) // 2], "none": b"no such file" * 9}
    late = compress("é".encode() * (3 * CHUNK // 2) + b"\xff" + "é".encode() * CHUNK)
    not_utf8 = f"byte {3 * CHUNK} is not UTF-8 (invalid start byte). It is damaged UTF-8"
    damaged = f"damaged or not a .{suffix} file"
    return {
        f"a.txt.{suffix}": Case(data, [TRICKY[1:]]),  # without the mark
        f"a.fa.{suffix}": Case(compress(made.FASTA[:30]) + compress(made.FASTA[30:]), DOCUMENTS["fa"]),
        f"late.txt.{suffix}": Case(late, error=not_utf8, seen_at_once=True),
        **{f"{name}.txt.{suffix}": Case(each, error=damaged, seen_at_once=True) for name, each in broken.items()},
    }


CASES = {
    **{name: Case(data, ["one\r\n\n", "", "中\u2028"], {f"{name}:1": "no text"}) for name, data in RECORDS.items()},
    "a.csv": Case(b"id,text\n1,one\n2,two\n", ["one", "two"]),
    "a.tsv": Case(b"id\ttext\n1\tone\n2\ttwo\n", ["one", "two"]),
    "late.jsonl": Case(b'{"title": "a"}\n{"title": "b", "text": "a"}\n', ["a"], {"late.jsonl:0": "no text"}),
    "txt.jsonl": Case(lines({"txt": "a"}), error=WRONG_COLUMN, seen_at_once=True),
    "txt.jsonl.gz": Case(gzip.compress(lines({"txt": "a"})), error=WRONG_COLUMN, seen_at_once=True),
    "txt.parquet": Case(parquet({"txt": "a"}), error=WRONG_COLUMN, seen_at_once=True),
    "int.jsonl": Case(lines({"text": 1}), error="column 'text' holds int"),
    "surrogate.jsonl": Case(lines({"text": "fine"}, {"text": "lone \ud800 one"}), error=""),
    "cut.jsonl": Case(b'{"text": "x"', error=NOT_RECORDS),
    "list.jsonl": Case(b"[1]", error="column 'text' holds int"),
    "deep.jsonl": Case(b"[" * 100_000, error=NOT_RECORDS),
    "none.jsonl": Case(b"not json", error=NOT_RECORDS),
    "none.parquet": Case(b"not parquet", error=NOT_RECORDS),
    "empty.txt": Case(b"", error="empty"),
    "empty.jsonl": Case(b"", error="empty"),
    "empty.parquet": Case(b"", error="empty"),
    "latin.txt": Case(b"caf\xe9 " * 20, error="byte 3 is not UTF-8", seen_at_once=True),
    **{f"a.{kind}": Case(made.KINDS[kind], found) for kind, found in DOCUMENTS.items()},
    "long.fa": Case(b">one\n" + b"ACGT" * 100_000 + b"\n>two\nA", ["ACGT" * 100_000, "A"]),  # longer than a chunk
    "digit.fa": Case(b">a\nAC\nA7\n", error="3: '7' is not a code"),
    "no-header.fa": Case(b"ACGT\n", error="1: a sequence before"),
    **{name: Case(data, ["one", "two"], NOT_IN_ARCHIVES) for name, data in ARCHIVES.items()},  # a link leads nowhere
    "no.zip": Case(b"PK no", skipped={"no.zip": "^a damaged archive"}),
    "cut.tar": Case(
        made.tarred({"a.txt": b"one" * 9999}, "w")[:9000],
        skipped={"a.txt": "^damaged", "cut.tar": "^a damaged archive"},
    ),
    "locked.zip": Case(made.locked(made.zipped({"a.txt": b"one"})), skipped={"a.txt": "^encrypted$"}),
    "bad.zip": Case(
        made.zipped({"a.txt": b"\xff\0\x81 no text", "b.txt": b"yes"}), ["yes"], {"a.txt": "text.encoding"}
    ),
    "no.docx": Case(b"no zip", skipped={"no.docx": "no ZIP archive"}),
    "empty.docx": Case(made.zipped({"x": b""}), skipped={"empty.docx": "it has no word/document.xml"}),
    "laughs.docx": Case(made.zipped({"word/document.xml": LAUGHS}), skipped={"laughs.docx": "declares entities"}),
    "broken.epub": Case(made.zipped({"META-INF/container.xml": b"<x"}), skipped={"broken.epub": "is not valid XML"}),
    "blank.html": Case(b"<p> </p>", skipped={"blank.html": "no text in it"}),
    "locked.epub": Case(lambda: made.locked(made.epub()), skipped={"locked.epub": "encrypted"}),
    "locked.pdf": Case(partial(made.pdf, password="secret"), skipped={"locked.pdf": "encrypted"}),
    **{name: case for suffix, way in COMPRESS.items() for name, case in compressed(suffix, way).items()},
}


def look(path: Path) -> None:
    check_quickly(recipe.Text.model_validate({"sources": [{"kind": "files", "paths": [str(path)]}]}))


@pytest.mark.parametrize("name", CASES)
def test_a_file_becomes_its_documents_or_is_refused(tmp_path: Path, name: str) -> None:
    if name.endswith(".pdf") and not find_spec("pypdfium2"):
        pytest.skip("pypdfium2 is not installed")
    path, case = tmp_path / name, CASES[name]
    path.write_bytes(case.data if isinstance(case.data, bytes) else case.data())
    if not case.texts and not case.skipped:
        refused = re.escape(f"{path}:") + ".*" + re.escape(case.error)
        with pytest.raises(UsageError, match=refused):
            texts(files(path))
        if case.seen_at_once:
            with pytest.raises(UsageError, match=refused):
                look(path)
            return
    else:
        found = list(files(path).documents())
        pieces = [list(each.pieces()) for each in found if isinstance(each, Document)]
        assert list(map("".join, pieces)) == list(case.texts)
        assert max((len(piece) for each in pieces for piece in each), default=0) <= 2 * CHUNK
        reasons = {Path(each.name).name: each.reason for each in found if isinstance(each, Skipped)}
        assert reasons.keys() == case.skipped.keys()
        assert all(re.search(case.skipped[each], reason) for each, reason in reasons.items())
        if path.suffix not in (".json", ".csv", ".tsv"):
            assert texts(files(tmp_path)) == list(case.texts), "in a folder too"
    look(path)


def test_documents_have_names_and_fields(tmp_path: Path) -> None:
    for name in ("a.jsonl", "a.fa", "a.zip", "a.tgz"):
        data = CASES[name].data
        (tmp_path / name).write_bytes(data if isinstance(data, bytes) else data())

    def found(name: str) -> list[tuple[str, Mapping[str, Any]]]:
        every = files(tmp_path / name).documents()
        return [(each.name.removeprefix(str(tmp_path)), each.fields) for each in every if isinstance(each, Document)]

    assert found("a.jsonl") == [(f"/a.jsonl:{number - 1}", {"n": number}) for number in (1, 3, 4)]
    assert found("a.fa") == [("/a.fa:chr1", {"header": "chr1 the first"}), ("/a.fa:chr2", {"header": "chr2"})]
    for name in ("a.zip", "a.tgz"):
        places = [("a.txt", {"file": "a.txt", "folder": ""}), ("below/b.md", {"file": "b.md", "folder": "below"})]
        assert found(name) == [(f"/{name}/{inside}", fields) for inside, fields in places]


def test_masks_of_a_sequence_are_kept_or_not(tmp_path: Path) -> None:
    path = tmp_path / "a.fa"
    path.write_bytes(made.FASTA)
    assert texts(files(path, soft_masks="upper")) == ["ACGTACGTNNACGT", "TTTTGG"]
    assert files(path).fingerprint != files(path, soft_masks="upper").fingerprint


ZEROS = bytes(2 << 20)
HIDDEN = {**{f"{n}.png": ZEROS for n in range(4)}, "last.txt": b"not reached"}


def tar_of_header(type: bytes) -> bytes:
    """A header that declares three gigabytes, and a megabyte of them."""
    header = tarfile.TarInfo("long.txt")
    header.type, header.size = type, 3 << 30
    return gzip.compress(header.tobuf(tarfile.GNU_FORMAT) + bytes(1 << 20))


BOMBS = {
    "a.zip": made.zipped({"good.txt": b"good", **{f"{n}.txt": ZEROS for n in range(4)}}),
    **{"b.zip": made.zipped(HIDDEN), "b.tgz": made.tarred(HIDDEN)},
    **{"name.tgz": tar_of_header(tarfile.GNUTYPE_LONGNAME), "extended.tgz": tar_of_header(tarfile.XHDTYPE)},
    "regular.tgz": tar_of_header(tarfile.REGTYPE),
}


def test_what_unpacks_to_too_much_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compression, "HARMLESS", 1 << 20)
    monkeypatch.setattr(compression, "RATIO", 100)
    for name, data in BOMBS.items():
        (tmp_path / name).write_bytes(data)
        found = files(tmp_path / name)
        assert texts(found) == (["good"] if name == "a.zip" else []), name
        assert any("times its size" in reason or "header" in reason for reason in skipped(found).values()), name
    (tmp_path / "a.txt.bz2").write_bytes(bz2.compress(ZEROS))
    with pytest.raises(UsageError, match="expands to more than"):
        texts(files(tmp_path / "a.txt.bz2"))


def test_a_document_that_takes_too_long_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slow.docx").symlink_to("/dev/zero")  # never ends
    with monkeypatch.context() as patch:
        patch.setattr(converted, "SECONDS", 0.5)
        assert isinstance(*DOCUMENT.documents(tmp_path / "slow.docx", ReadOptions()), Skipped)
    (tmp_path / "good.html").write_bytes(made.html())
    assert texts(files(tmp_path / "good.html")) == DOCUMENTS["html"]


def test_a_document_is_converted_once_though_it_is_read_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.epub").write_bytes(made.epub())
    requests: list[object] = []
    ask = converted.PROCESS.ask
    monkeypatch.setattr(converted.PROCESS, "ask", lambda *request: requests.append(request) or ask(*request))
    (document,) = files(tmp_path / "a.epub").documents()
    assert isinstance(document, Document)
    assert document.measure().bytes == sum(len(piece.encode()) for piece in document.pieces())
    assert len(requests) == 1


def test_the_quick_look_opens_no_document_and_ends_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes of a document are not UTF-8, and yet no mistake."""
    monkeypatch.setattr(sources, "open_sources", lambda text: pytest.fail("opened the text"))
    (tmp_path / "a.docx").write_bytes(made.docx())
    look(tmp_path / "a.docx")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    monkeypatch.setattr(sources, "QUICK_SECONDS", -1.0)
    look(tmp_path / "latin.txt")


FINGERPRINTS = {
    "a.txt": "text .txt .txt",
    "a.TXT.gz": "text .txt .gz",
    "a.jsonl": "text .jsonl .jsonl as json auto",
    "a.tsv.xz": "text .tsv .xz as csv auto",
    "a.fa": "text .fa .fa soft masks keep",
    "a.tar.gz": "text .tar .gz archive auto",
    "a.html": "text .html .html by 2",
    "README": "text  ",
}


def test_fingerprints_of_formats_never_change_so_that_cached_tokens_stay_valid(tmp_path: Path) -> None:
    for name in FINGERPRINTS:
        (tmp_path / name).write_bytes(b"not compressed" * name.endswith((".gz", ".xz")))  # which only `check` reports
    found = {name: format_of(Path(name)).fingerprint(tmp_path / name, ReadOptions()) for name in FINGERPRINTS}
    assert found == FINGERPRINTS


@pytest.mark.parametrize("suffix", FORMATS)
def test_a_suffix_is_looked_up_in_any_case_and_with_a_compression_where_that_is_supported(suffix: str) -> None:
    file_format = FORMATS[suffix]
    assert format_of(Path(f"a{suffix.upper()}")) is file_format
    for each in COMPRESSED:
        assert (format_of(Path(f"a{suffix}{each}")) is file_format) == (each in file_format.compressions)


def test_a_compressed_document_is_refused_and_a_compressed_zip_is_unknown() -> None:
    assert format_of(Path("a.pdf.gz")).refusal == "a compressed document: unpack it"
    assert format_of(Path("a.zip.gz")) is format_of(Path("a.tar.zst")) is format_of(Path("a.log")) is UNKNOWN
