"""n-gram attention by definition: a T x T matrix of weights.

Each row of the state belongs to one n-gram, and holds the sum and the number of the values that followed it. The value
of a token is added to the row of the n tokens before it; if the row belongs to another n-gram, it is cleared first.
Then the row of the last n tokens is read, if it belongs to them.

B batch, H heads, T time, V value dim, R rows (`buckets`).
"""

import torch
from torch import Tensor

from lmlong.attention.base import causal_mask
from lmlong.attention.ngram.hashing import NO_NGRAM, row_of


def quadratic(v: Tensor, hashes: Tensor, document_starts: Tensor | None, buckets: int) -> tuple[Tensor, Tensor]:
    """Return the sum (B, H, T, V) and the number (B, H, T) of the values in the row that each token reads."""
    written, read = hashes.unbind(-1)  # (B, H, T)
    time = torch.arange(v.shape[2], device=v.device)
    # (B, H, T, T): read at t, written at s <= t
    past = causal_mask(len(time), v.device, document_starts) & (written != NO_NGRAM)[..., None, :]
    same_row = row_of(written, buckets)[..., None, :] == row_of(read, buckets)[..., :, None]
    same_ngram = written[..., None, :] == read[..., :, None]
    cleared = torch.where(past & same_row & ~same_ngram, time, -1).amax(-1, keepdim=True)
    weights = (past & same_ngram & (time > cleared)).to(v.dtype)
    return weights @ v, weights.sum(-1)
