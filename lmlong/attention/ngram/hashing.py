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
    and the hash of the last n tokens including it.

    `tokens` (B, T, P) are the last P tokens at each token, -1 for tokens of another document; P exceeds all sizes.
    """
    of_size = {n: torch.stack([_hash(tokens[..., -n - 1 : -1]), _hash(tokens[..., -n:])], -1) for n in set(sizes)}
    # the value at a document's first token belongs to no n-gram
    return torch.stack([of_size[n] for n in sizes], dim=1)


def row_of(hashes: Tensor, buckets: int) -> Tensor:
    """Return the row of each hash, from its higher bits."""
    return (hashes >> (BITS // 2)) * buckets >> (BITS // 2)


def _hash(ngrams: Tensor) -> Tensor:
    """Return a hash (B, T) of each of (B, T, n) tokens."""
    hashed = torch.zeros_like(ngrams[..., 0])
    for tokens in ngrams.unbind(-1):
        hashed = (hashed * MULTIPLIER + tokens + 1) & MAX_HASH
    return torch.where((ngrams >= 0).all(-1), hashed * GOLDEN & MAX_HASH, NO_NGRAM)
