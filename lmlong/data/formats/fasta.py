"""FASTA: each record, a header and its sequence, is a document."""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from lmlong.data.document import Document, ReadOptions, SoftMasks
from lmlong.data.formats.compression import read_bytes, slices
from lmlong.errors import UsageError

NOT_A_SEQUENCE = re.compile(rb"[^A-Za-z*.-]")
"""Matches what is not the code of a nucleotide or an amino acid, nor a gap."""


def sequences(path: Path, options: ReadOptions) -> Iterator[Document]:
    """Iterate over the sequences of nucleotides or amino acids in a file. The text is the sequence without line ends;
    the field `header` holds the header. Soft masks, which are lower-case letters, are kept or converted to upper
    case."""
    name, soft_masks = str(path), options.soft_masks
    header: bytes | None = None
    sequence = bytearray()
    for number, begins, data in _pieces(read_bytes(path)):
        if begins == b">":
            if header is not None and data.startswith(b">"):
                yield _document(name, header, sequence, soft_masks)
                header, sequence = None, bytearray()
            header = (header or b"") + data
        elif begins != b";" and (letters := data.strip()):
            if header is None:
                raise UsageError(
                    f"{name}:{number}: a sequence before the first header. Start the file with > and a name."
                )
            if wrong := NOT_A_SEQUENCE.search(letters):
                shown = wrong[0].decode("latin-1")
                raise UsageError(
                    f"{name}:{number}: {shown!r} is not a code of a sequence. Correct the file, or exclude it."
                )
            sequence += letters
    if header is not None:
        yield _document(name, header, sequence, soft_masks)


def _document(name: str, header: bytes, sequence: bytearray, soft_masks: SoftMasks) -> Document:
    data = bytes(sequence.upper() if soft_masks == "upper" else sequence)
    about = header[1:].strip().decode("utf-8", "replace")
    first = about.split()[0] if about else "unnamed"
    return Document(f"{name}:{first}", lambda: slices(data), fields={"header": about})


def _pieces(chunks: Iterable[bytes]) -> Iterator[tuple[int, bytes, bytes]]:
    """Iterate over pieces of lines, each with the number and the first byte of its line. A line may have any length."""
    number, begins = 1, b""
    for chunk in chunks:
        for line, piece in enumerate(chunk.split(b"\n")):
            if line:
                number, begins = number + 1, b""
            if piece:
                begins = begins or piece[:1]
                yield number, begins, piece
