"""Documents of word processors, e-books, web pages and PDFs: their text, converted by another process in bounded time
and memory."""

import atexit
import json
import subprocess
import sys
import threading
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

KINDS = (".epub", ".docx", ".pdf", ".html", ".htm", ".xhtml")
"""The suffixes of what is converted."""

NEEDS = {".pdf": "pypdfium2"}
"""The package that a kind needs, of the extra `documents`."""

READER = 2
"""Counted up whenever the text of a document becomes another one, so that its tokens are made anew."""

SECONDS, SECONDS_PER_MB = 60.0, 2.0


class ConversionError(Exception):
    """A document that cannot be converted, with the reason."""


def why_not(kind: str) -> str | None:
    """Return why documents of a kind cannot be converted here; None where they can."""
    package = NEEDS.get(kind)
    if package and find_spec(package) is None:
        return "needs lmlong[documents]: run pip install 'lmlong[documents]'"
    return None


def reader_of(kind: str) -> str:
    """Return what the text of a document depends on beside its bytes."""
    try:
        return f"{READER} {version(NEEDS[kind])}" if kind in NEEDS else str(READER)
    except PackageNotFoundError:
        return str(READER)


class Converter:
    """The other process: it is started when it is needed, and anew after a document that it did not survive."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def convert(self, path: Path, kind: str) -> bytes:
        """Return the text of a document in UTF-8."""
        with self._lock:
            return self._convert(path, kind)

    def close(self) -> None:
        """End the process."""
        if self._process:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _convert(self, path: Path, kind: str) -> bytes:
        process = self._running()
        assert process.stdin and process.stdout
        limit = SECONDS + SECONDS_PER_MB * path.stat().st_size / 1e6
        timer = threading.Timer(limit, process.kill)
        timer.start()
        try:
            process.stdin.write(json.dumps({"kind": kind, "path": str(path.resolve())}).encode() + b"\n")
            process.stdin.flush()
            answer = json.loads(process.stdout.readline() or b"null")
            data = process.stdout.read(answer.get("bytes", 0)) if answer else b""
        except BrokenPipeError:
            answer, data = None, b""
        finally:
            in_time = timer.is_alive()
            timer.cancel()
        if answer is None or len(data) < answer.get("bytes", 0):
            self.close()
            raise ConversionError(
                "the program that reads it ended" if in_time else f"reading it took more than {limit:.0f} seconds"
            )
        if "error" in answer:
            raise ConversionError(answer["error"])
        return data

    def _running(self) -> "subprocess.Popen[bytes]":
        if self._process is None or self._process.poll() is not None:
            words = [sys.executable, "-m", "lmlong.data.converters.worker"]
            self._process = subprocess.Popen(
                words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            )
        return self._process


CONVERTER = Converter()
atexit.register(CONVERTER.close)


def converted(path: Path, kind: str) -> bytes:
    """Return the text of a document; it is converted once where it is read several times in a row."""
    about = path.stat()
    return _converted(path, kind, about.st_mtime_ns, about.st_size)


@lru_cache(maxsize=1)
def _converted(path: Path, kind: str, changed: int, size: int) -> bytes:
    return CONVERTER.convert(path, kind)
