"""What a document may hold, and the error of one that cannot be converted."""

LARGEST = 1 << 28
"""Bytes of the largest part that is unpacked, and of the longest text."""

ALL_PARTS = 1 << 30
"""Bytes of all parts that are unpacked."""


class Broken(Exception):
    """A file that is not what it seems, with the reason."""


def check_text(size: int, most: int = LARGEST) -> None:
    """Refuse a text that is too long."""
    if size > most:
        raise Broken(f"its text has more than {most:,} bytes")
