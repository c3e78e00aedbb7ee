"""What documents became, for `lmlong data show`."""

import json
import sys
from itertools import islice

import click

from lmlong.data.document import Document, Skipped
from lmlong.data.sources import Input, open_inputs
from lmlong.recipe import Text


def show_documents(text: Text, most: int | None, characters: int | None, as_json: bool) -> None:
    """Print the first documents of a text, of each source as many."""
    for entry in open_inputs(text):
        shown = 0
        for skipped in entry.source.left_out:
            _tell(f"left out {skipped.name}: {skipped.reason}")
        for found in entry.source.documents():
            if isinstance(found, Skipped):
                _tell(f"skipped {found.name}: {found.reason}")
                continue
            if shown == most:
                _tell("and more: give --documents or --all")
                break
            shown += 1
            _show(found, entry, characters, as_json)


def _show(document: Document, entry: Input, characters: int | None, as_json: bool) -> None:
    size = document.measure().bytes
    if as_json:
        text = "".join(islice((character for piece in document.pieces() for character in piece), characters))
        about = {"source": entry.source.name, "document": document.name, "bytes": size, **document.fields}
        click.echo(json.dumps({**about, "text": text}, default=str))
        return
    _tell(f"--- {document.name}: {size:,} bytes")
    left, last = size if characters is None else characters, ""
    for piece in document.pieces():
        piece = piece[:left]
        sys.stdout.write(piece)
        last, left = piece[-1:], left - len(piece)
        if not left:
            break
    sys.stdout.write("" if last == "\n" else "\n")
    sys.stdout.flush()


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
