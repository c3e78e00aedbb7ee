"""The hashes of n-grams: fixed integer arithmetic modulo 2^62, the same here and in C++.

B batch, H heads, T time.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

BITS = 62
"""Bits of a hash: few enough to fit a signed integer, so that no hash is NO_NGRAM."""

MAX_HASH = (1 << BITS) - 1

MULTIPLIER = 0x27D4EB2F165667C5
GOLDEN = 0x278DDE6E5FD29E01
"""2^62 over the golden ratio. Its multiples spread evenly, so single tokens have different rows if there are more than
twice as many rows as tokens."""

NO_NGRAM = -1
"""The hash if the document has too few tokens so far."""


def ngram_hashes(tokens: Tensor, sizes: Sequence[int]) -> Tensor:
    """Return hashes (B, H, T, 2) for heads with these n-gram sizes: the hash of the n tokens before the current token,
    and the hash of the last n tokens including it. A hash is a polynomial in MULTIPLIER of the tokens plus 1.

    `tokens` (B, T, P) are the last P tokens at each token, -1 for tokens of another document; P exceeds all sizes.
    """
    end, power, of_size = tokens.shape[-1], 1, {}
    hashed = tokens.new_zeros(*tokens.shape[:-1], 2)  # of the tokens before the current one, and including it
    for n in range(1, max(sizes) + 1):
        oldest = tokens[..., end - n - 1 : end - n + 1] + 1
        hashed = hashed.add(oldest, alpha=power)
        power = _as_int64(power * MULTIPLIER)
        if n in sizes:
            of_size[n] = torch.where(oldest > 0, (hashed & MAX_HASH) * GOLDEN & MAX_HASH, NO_NGRAM)
    # the value at a document's first token belongs to no n-gram
    return torch.stack([of_size[n] for n in sizes], dim=1)


def row_of(hashes: Tensor, buckets: int) -> Tensor:
    """Return the row of each hash, from its higher bits."""
    return (hashes >> (BITS // 2)) * buckets >> (BITS // 2)


def _as_int64(number: int) -> int:
    """Return the number modulo 2^64 as a signed integer, as products of int64 tensors are."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)
