"""The text of a file that is uploaded to a server."""

import bz2
import gzip
import lzma
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from functools import partial

import httpx
import pytest
import zstandard
from data.made_documents import DOCX_TEXT, PAGE_TEXT, PDF_TEXT, docx, epub, html, pdf, zipped
from serving.schedulers import subwords, tiny
from serving.servers import COMPLETIONS, SESSIONS, Served, answered, served, until

from lmlong.data.formats.compression import COMPRESSED
from lmlong.data.formats.table import FIRST_BYTES, FORMATS, MEDIA_TYPES, suffix_of_bytes
from lmlong.serving import body_reader
from lmlong.serving.api_errors import ApiError
from lmlong.serving.bodies import text_of_file
from lmlong.serving.body_reader import SMALL
from lmlong.serving.upload_worker import text_of

ANY = "application/octet-stream"
PROMPT = 1000
BOOK = "naïve Bären, a cab\n" * 40
EPUB_TEXT = "\n".join(PAGE_TEXT.format(title=name) for name in "ba")
FILES: dict[str, tuple[Callable[[], bytes], str]] = {
    ".epub": (epub, EPUB_TEXT),
    ".docx": (docx, DOCX_TEXT),
    ".pdf": (pdf, PDF_TEXT),
    ".html": (html, PAGE_TEXT.format(title="Page")),
    ".gz": (lambda: gzip.compress(BOOK.encode()), BOOK),
    ".bz2": (lambda: bz2.compress(BOOK.encode()), BOOK),
    ".xz": (lambda: lzma.compress(BOOK.encode()), BOOK),
    ".zst": (lambda: zstandard.compress(BOOK.encode()), BOOK),
}
ZEROS = bytes(1 << 20)
LINES = [f"line {number} of a long text" for number in range(400)]


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served(tiny(tokenizer=subwords()), max_prompt=PROMPT) as server:
        yield server


def upload(server: Served, data: bytes, media_type: str = ANY, path: str = SESSIONS) -> httpx.Response:
    return server.upload(data, {"Content-Type": media_type}, path)


def refused(answer: httpx.Response) -> str:
    """The message of an error that a client can mend."""
    return answered(answer, 400)["error"]["message"]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32"])
def test_a_text_is_read_in_the_encoding_of_its_mark(encoding: str) -> None:
    assert text_of_file("naïve Bären".encode(encoding)) == "naïve Bären"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("naïve".encode("latin-1"), "not UTF-8 at byte 2"),
        (b"\xff\xfea", "not UTF-16 at byte 2"),
        (b"a\0b", "U\\+0000"),
    ],
)
def test_what_is_no_text_is_refused_with_the_reason(data: bytes, message: str) -> None:
    with pytest.raises(ApiError, match=message):
        text_of_file(data)


def test_each_kind_of_file_that_is_converted_has_a_media_type() -> None:
    documents = {suffix for suffix, kind in FORMATS.items() if kind.is_whole and not kind.is_text}
    assert MEDIA_TYPES.keys() == {*documents, *COMPRESSED} > FILES.keys()
    assert {*COMPRESSED, ".pdf", ".zip"} < {*FIRST_BYTES.values()}


@pytest.mark.parametrize("suffix", FILES)
def test_a_file_of_each_kind_is_known_by_its_first_bytes_and_becomes_its_text(suffix: str) -> None:
    if suffix == ".pdf":
        pytest.importorskip("pypdfium2")
    make, text = FILES[suffix]
    known = suffix_of_bytes(make())
    assert known == {".epub": ".zip", ".docx": ".zip", ".html": None}.get(suffix, suffix)
    assert text_of({"data": make(), "suffix": known or suffix, "longest": 4 * PROMPT}).decode() == text


@pytest.mark.parametrize(
    ("data", "media_type", "text"),
    [
        (epub(), ANY, EPUB_TEXT),
        (docx(), MEDIA_TYPES[".docx"] + "; charset=x", DOCX_TEXT),
        (html(), "text/html", PAGE_TEXT.format(title="Page")),
        # 980 bytes, but 1,682 in UTF-16, which are more than a prompt may have
        (gzip.compress(("naïve " * 140).encode("utf-16")), MEDIA_TYPES[".gz"], "naïve " * 140),
    ],
    ids=["EPUB", "DOCX", "HTML", "UTF-16"],
)
def test_a_file_is_read_into_a_session_as_its_text(server: Served, data: bytes, media_type: str, text: str) -> None:
    expected = server.session(text)
    session = answered(upload(server, data, media_type), 201)
    assert (session["tail"], session["tokens"]) == (text[-200:], expected["tokens"])
    appended = answered(upload(server, data, media_type, f"{SESSIONS}/{session['id']}/append"))
    assert appended["tokens"] > session["tokens"] and appended["tail"] == (text + text)[-200:]


HOSTILE: dict[str, tuple[str, Callable[[], bytes], str]] = {
    "bomb.gz": (ANY, lambda: gzip.compress(ZEROS), "it unpacks to more than 4,004 bytes"),
    "bomb.epub": (ANY, lambda: epub(ZEROS), "unpacks to more than 16,016 bytes"),
    "bomb.pdf": (ANY, lambda: pdf([LINES]), "its text has more than 4,004 bytes"),
    "long.html": ("text/html", lambda: b"<p>a" * 2000, "its text has more than 4,004 bytes"),
    "cut.xz": (ANY, lambda: lzma.compress(BOOK.encode())[:-9], "damaged"),
    "cut.epub": (MEDIA_TYPES[".epub"], lambda: epub()[:-30], "EPUB (no ZIP archive"),
    "wrong.docx": (MEDIA_TYPES[".docx"], epub, "DOCX (it has no word/document.xml"),
    "wrong.pdf": (MEDIA_TYPES[".pdf"], html, "PDF (Failed to load document"),
    "wrong.gz": (MEDIA_TYPES[".gz"], html, "GZ (damaged or of another kind"),
    "locked.pdf": (ANY, lambda: pdf(password="secret"), "PDF (encrypted)"),
    "any.zip": (ANY, lambda: zipped({"a.txt": b"a"}), "neither an EPUB nor a DOCX: unpack it"),
    "page.html.gz": (ANY, lambda: gzip.compress(epub()), "a document or a compressed file in it"),
    "blank.html": ("text/html", lambda: b"<p> </p>", "no text in it"),
    "zero.gz": (ANY, lambda: gzip.compress(b"a\0b"), "U+0000"),
    "latin-1.gz": (ANY, lambda: gzip.compress("naïve".encode("latin-1")), "not UTF-8 at byte 2"),
    "a.rtf": (ANY, lambda: b"{\\rtf1 a}", "RTF (an unsupported document format: save it as .docx"),
    "long.gz": (ANY, lambda: gzip.compress(b"a" * 1500), "text: 1,500 bytes are more than the 1,000"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_refused_with_the_reason(server: Served, name: str) -> None:
    if ".pdf" in name:
        pytest.importorskip("pypdfium2")
    media_type, make, message = HOSTILE[name]
    before = server.get(SESSIONS)
    assert message in refused(upload(server, make(), media_type))
    assert server.get(SESSIONS) == before


def test_a_pdf_needs_its_library(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FORMATS, ".pdf", FORMATS[".pdf"]._replace(package="no_such_package"))
    assert "pip install -e '.[documents]'" in refused(upload(server, b"%PDF-1.7"))


def stopped(server: Served) -> tuple[subprocess.Popen[bytes], threading.Thread, list[httpx.Response]]:
    """Stop the process that converts files while it has one: the process, a thread that waits, and its answer."""
    process = server.service.reader.process._process
    assert process
    os.kill(process.pid, signal.SIGSTOP)
    answers: list[httpx.Response] = []
    ask = partial(httpx.post, f"{server.url}{SESSIONS}", content=html(), headers={"Content-Type": "text/html"})
    waiting = threading.Thread(target=lambda: answers.append(ask(timeout=60)))
    waiting.start()
    until(lambda: bool(server.service.reader.converter._jobs))
    return process, waiting, answers


@pytest.mark.parametrize("end", ["death", "timeout"])
def test_a_file_that_takes_long_delays_no_other_request(
    server: Served, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    assert upload(server, html(), "text/html").status_code == 201
    if end == "timeout":
        monkeypatch.setattr(body_reader, "SECONDS", 1.0)
    process, waiting, answers = stopped(server)
    assert upload(server, b"a plain text").status_code == 201
    assert server.post(COMPLETIONS, prompt="a", max_tokens=1, user="x" * SMALL).status_code == 200
    assert server.client.get("/ready").status_code == 200
    if end == "death":
        process.kill()
    waiting.join(60)
    expected = {"death": "the program that reads it ended", "timeout": "it took more than 1 second"}
    assert expected[end] in refused(answers[0])
    monkeypatch.undo()
    assert upload(server, html(), "text/html").status_code == 201


def test_a_server_that_ends_does_not_wait_for_a_file() -> None:
    with served(tiny()) as server:
        assert upload(server, html(), "text/html").status_code == 201
        process, waiting, answers = stopped(server)
    waiting.join(60)
    assert answers[0].status_code == 503 and process.poll() is not None
