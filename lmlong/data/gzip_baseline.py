"""The gzip -9 baseline on the same text: a number that anyone can repeat, and that every model should beat."""

import zlib

from lmlong.data.token_file import TokenFile
from lmlong.data.tokenizer import Tokenizer

PIECE = 1 << 16


def gzip_bits_per_byte(file: TokenFile, tokenizer: Tokenizer) -> float:
    """Return the bits that gzip -9 spends per byte of the text in a token file, all documents in one stream."""
    stream = zlib.compressobj(level=9, wbits=31)  # 31: the gzip format
    read = written = 0
    for begin in range(0, len(file.tokens), PIECE):
        data = tokenizer.decode_bytes(file.tokens[begin : begin + PIECE])
        read += len(data)
        written += len(stream.compress(data))
    return 8 * (written + len(stream.flush())) / read
