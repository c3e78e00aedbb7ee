"""FASTA: each record, a header and its sequence, is a document."""

import re
from collections.abc import Iterable, Iterator
from typing import Literal

from lmlong.data.reading import Document, slices
from lmlong.errors import UsageError

KINDS = (".fa", ".fasta", ".fna", ".faa")

NOT_A_SEQUENCE = re.compile(rb"[^A-Za-z*.-]")
"""No code of a nucleotide or an amino acid, and no gap."""

SoftMasks = Literal["keep", "upper"]


def fasta_documents(chunks: Iterable[bytes], name: str, soft_masks: SoftMasks) -> Iterator[Document]:
    """Iterate over the records of a file: the text is the sequence without line ends, the field `header` the rest.
    Soft masks, letters in lower case, are kept, or made upper case."""
    header: bytes | None = None
    sequence = bytearray()
    for number, begins, data in _pieces(chunks):
        if begins == b">":
            if header is not None and data.startswith(b">"):
                yield _document(name, header, sequence, soft_masks)
                header, sequence = None, bytearray()
            header = (header or b"") + data
        elif begins != b";" and (letters := data.strip()):
            if header is None:
                raise UsageError(f"{name}:{number}: a sequence before the first header. Begin FASTA with > and a name.")
            if wrong := NOT_A_SEQUENCE.search(letters):
                shown = wrong[0].decode("latin-1")
                raise UsageError(
                    f"{name}:{number}: {shown!r} is no letter of a sequence. Mend the file, or leave it out."
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
    """Iterate over pieces of lines, each with the number and the first byte of its line: lines may be of any length."""
    number, begins = 1, b""
    for chunk in chunks:
        for place, piece in enumerate(chunk.split(b"\n")):
            if place:
                number, begins = number + 1, b""
            if piece:
                begins = begins or piece[:1]
                yield number, begins, piece
