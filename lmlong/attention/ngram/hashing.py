"""The hashes of n-grams: fixed integer arithmetic modulo 2^62, the same here and in C++.

B batch, H heads, T time.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

BITS = 62
"""Of a hash, so that it fits a signed number, and none is NO_NGRAM."""

MAX_HASH = (1 << BITS) - 1

MULTIPLIER = 0x27D4EB2F165667C5
GOLDEN = 0x278DDE6E5FD29E01
"""2^62 over the golden ratio: multiples of it spread evenly, so the rows of single tokens do not meet where there are
more than twice as many rows as tokens."""

NO_NGRAM = -1
"""The hash where a document has not had so many tokens yet."""


def ngram_hashes(tokens: Tensor, sizes: Sequence[int]) -> Tensor:
    """Return hashes (B, H, T, 2) for heads that look up n-grams of these sizes: of the n tokens before the current
    one, and of the n tokens that end with it.

    `tokens` (B, T, P) are the tokens up to each, -1 for those of another document; P is above all sizes.
    """
    of_size = {n: torch.stack([_hash(tokens[..., -n - 1 : -1]), _hash(tokens[..., -n:])], -1) for n in set(sizes)}
    # what is learned at a document's first token belongs to no n-gram
    return torch.stack([of_size[n] for n in sizes], dim=1)


def row_of(hashes: Tensor, buckets: int) -> Tensor:
    """Return the row of each hash, by its higher bits."""
    return (hashes >> (BITS // 2)) * buckets >> (BITS // 2)


def _hash(ngrams: Tensor) -> Tensor:
    """Return a hash (B, T) of each of (B, T, n) tokens."""
    hashed = torch.zeros_like(ngrams[..., 0])
    for tokens in ngrams.unbind(-1):
        hashed = (hashed * MULTIPLIER + tokens + 1) & MAX_HASH
    return torch.where((ngrams >= 0).all(-1), hashed * GOLDEN & MAX_HASH, NO_NGRAM)
