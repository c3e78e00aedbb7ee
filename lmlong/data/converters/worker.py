"""The process that converts documents: files by hostile hands may take its time and memory, but not those of others.

A request is a line of JSON: kind and path. The answer is a line of JSON, an error or the size of a text, and the text.
"""

import json
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from lmlong.data.converters.html import html_text
from lmlong.data.converters.limits import Broken, check_text
from lmlong.data.converters.office import docx_text, epub_text
from lmlong.data.converters.pdf import pdf_text

MEMORY = 4 << 30
"""Bytes of address space."""

CONVERTERS: dict[str, Callable[[bytes], str]] = {
    ".docx": docx_text,
    ".epub": epub_text,
    ".htm": html_text,
    ".html": html_text,
    ".pdf": pdf_text,
    ".xhtml": html_text,
}


def main() -> None:
    """Answer requests from standard input until it ends."""
    _limit_memory()
    for line in sys.stdin.buffer:
        request = json.loads(line)
        answer, data = _converted(request["kind"], Path(request["path"]))
        sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n" + data)
        sys.stdout.buffer.flush()


def _converted(kind: str, path: Path) -> tuple[dict[str, int | str], bytes]:
    try:
        data = CONVERTERS[kind](path.read_bytes()).encode("utf-8", "replace")
        check_text(len(data))
        return {"bytes": len(data)}, data
    except (Broken, OSError) as error:
        return {"error": str(error)}, b""
    except MemoryError:
        return {"error": f"it takes more than {MEMORY >> 30} GB"}, b""
    except Exception as error:  # of the libraries below, about damaged files
        return {"error": f"{type(error).__name__}: {error}"}, b""


def _limit_memory() -> None:
    with suppress(ImportError, ValueError, OSError):  # where the system knows no such limit
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))


if __name__ == "__main__":
    main()
