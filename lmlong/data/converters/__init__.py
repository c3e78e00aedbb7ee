"""Convert word processor documents, e-books, web pages and PDFs to text, in a separate process. Limits of a document's
content, and the error for a document that cannot be converted."""

LARGEST = 1 << 28
"""Bytes of the largest part that is unpacked, and of the longest text."""

ALL_PARTS = 1 << 30
"""Bytes of all parts that are unpacked."""


class Broken(Exception):
    """An invalid document, with the reason."""


def check_text(size: int, most: int = LARGEST) -> None:
    """Raise Broken if a text is too long."""
    if size > most:
        raise Broken(f"its text has more than {most:,} bytes")
