"""Tensors as compressed bytes.

Bytes of equal significance are compressed together, the exponents of floats among them. The lower bytes of floats look
random, so zstandard stores them as they are. A crafted file cannot unpack to more than a given number of bytes.
"""

import json
from collections.abc import Mapping
from io import BytesIO
from math import prod

import numpy as np
import torch
import zstandard
from torch import Tensor

from lmlong.io.files import parse_json

LEVEL = 1
SMALL = 256
"""Tensors of fewer elements are compressed as a whole, since each compressed part begins with a header."""

HEADER = 1 << 20
"""Maximum bytes of the list of tensors."""

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )
}


def encode(tensors: Mapping[str, Tensor], limit: int) -> bytes:
    """Return the bytes of tensors, of which up to `limit` bytes are compressed and the rest stored as it is."""
    compressor = zstandard.ZstdCompressor(LEVEL)
    entries, parts = [], []
    for name, x in tensors.items():
        values = x.clone(memory_format=torch.contiguous_format).flatten()
        planes = values.view(torch.uint8).view(x.numel(), x.element_size()).T.contiguous()
        limit -= planes.numel()
        rows = planes if x.numel() >= SMALL else planes.flatten()[None]
        pieces = [row.numpy().tobytes() for row in rows]
        part = b"".join(map(compressor.compress, pieces) if limit >= 0 else pieces)
        entries.append([name, str(x.dtype).removeprefix("torch."), list(x.shape), len(part)])
        parts.append(part)
    header = compressor.compress(json.dumps(entries).encode())
    return b"".join([len(header).to_bytes(4, "little"), header, *parts])


def decode(data: bytes, limit: int) -> dict[str, Tensor]:
    """Return the tensors that `encode` wrote with the same limit. Raises ValueError if the bytes are damaged."""
    begin = 4 + int.from_bytes(data[:4], "little")
    tensors = {}
    try:
        for name, dtype, shape, size in parse_json(_decompressed(data[4:begin], HEADER, exact=False)):
            kind, part = DTYPES[dtype], data[begin : begin + size]
            if any(type(number) is not int or number < 0 for number in (*shape, size)):
                raise ValueError("a size is negative or not an integer")
            whole = prod(shape) * kind.itemsize
            limit -= whole
            if limit >= 0:
                part = _decompressed(part, whole)
            if len(part) != whole:
                raise ValueError("a tensor is incomplete")
            values = np.empty((prod(shape), kind.itemsize), np.uint8)
            for number, plane in enumerate(np.frombuffer(part, np.uint8).reshape(kind.itemsize, -1)):
                values[:, number] = plane
            tensors[name] = torch.from_numpy(values.reshape(-1)).view(kind).view(shape)
            begin += size
    except (zstandard.ZstdError, TypeError, KeyError, RuntimeError, OverflowError) as error:
        raise ValueError("not compressed tensors") from error
    return tensors


def _decompressed(data: bytes, size: int, exact: bool = True) -> bytes:
    """Return up to `size` bytes that were compressed, in one part or several."""
    with zstandard.ZstdDecompressor().stream_reader(BytesIO(data), read_across_frames=True) as stream:
        found = stream.read(size)
        if exact and len(found) != size:
            raise ValueError("a tensor is incomplete")
    return found
