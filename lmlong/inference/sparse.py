"""Tensors that mostly equal an empty state, stored in a file as the rows that differ from it.

A table of n-gram attention has a row for each possible n-gram, and a short text fills few of them.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

INDICES, ROWS = ".sparse_places", ".sparse_rows"
"""Suffixes of the names of the two tensors that stand for one."""

ALWAYS_DENSE = 4096
"""Tensors of up to this number of values are stored as they are."""


def pack(tensors: Mapping[str, Tensor], empty: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors for a file; those that mostly equal the `empty` state are stored as the rows that differ."""
    kept = {}
    for name, x in tensors.items():
        if x.numel() > ALWAYS_DENSE and x.shape == empty[name].shape and x.dtype == empty[name].dtype:
            rows = _rows(x)
            indices = (rows != _rows(empty[name].to(x.device))).any(-1).nonzero()[:, 0]
            if 2 * len(indices) < len(rows):
                kept[name + INDICES], kept[name + ROWS] = indices, rows[indices]
                continue
        kept[name] = x
    return kept


def unpack(kept: Mapping[str, Tensor], empty: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the packed tensors; raise ValueError if they are not of this state."""
    tensors = {name: x for name, x in kept.items() if not name.endswith((INDICES, ROWS))}
    for name in (name.removesuffix(INDICES) for name in kept if name.endswith(INDICES)):
        indices, rows = kept[name + INDICES], kept.get(name + ROWS)
        if name not in empty or rows is None or indices.dtype != torch.long or indices.ndim != 1:
            raise ValueError(name)
        whole = empty[name].detach().cpu().to(rows.dtype, copy=True).contiguous()
        into = _rows(whole)
        if rows.shape != (len(indices), into.shape[1]) or (
            len(indices) and not 0 <= int(indices.min()) <= int(indices.max()) < len(into)
        ):
            raise ValueError(name)
        into[indices] = rows
        tensors[name] = whole
    return tensors


def _rows(x: Tensor) -> Tensor:
    """Return a view as rows: the values of an entry in a table (B, H, R, V), or single values."""
    return x.reshape(-1, x.shape[-1] if x.ndim == 4 else 1)
