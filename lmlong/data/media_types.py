"""The kind of a file that comes without a name: by its media type, or by its first bytes."""

MEDIA_TYPES = {
    ".epub": "application/epub+zip",
    ".docx": "application/vnd.openxmlformats-officedocument.wordprocessingml.document",
    ".pdf": "application/pdf",
    ".html": "text/html",
    ".htm": "text/html",
    ".xhtml": "application/xhtml+xml",
    ".gz": "application/gzip",
    ".zst": "application/zstd",
    ".bz2": "application/x-bzip2",
    ".xz": "application/x-xz",
}
"""Suffix -> media type, for each kind of file that is converted or decompressed."""

SUFFIXES = {media_type: suffix for suffix, media_type in MEDIA_TYPES.items()}

FIRST_BYTES = {
    b"PK\3\4": ".zip",
    b"%PDF-": ".pdf",
    b"\x1f\x8b": ".gz",
    b"\x28\xb5\x2f\xfd": ".zst",
    **{b"BZh%d1AY&SY" % level: ".bz2" for level in range(1, 10)},
    b"\xfd7zXZ\0": ".xz",
    b"\xd0\xcf\x11\xe0": ".doc",
    b"{\\rtf": ".rtf",
}
"""What files begin with that are not plain text."""


def suffix_of(data: bytes) -> str | None:
    """Return the suffix that belongs to the first bytes of a file; None for plain text. EPUB and DOCX are `.zip`."""
    return next((suffix for first, suffix in FIRST_BYTES.items() if data.startswith(first)), None)
