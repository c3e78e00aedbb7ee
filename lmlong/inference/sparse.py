"""Tensors that mostly equal those of a base, such as an empty state, stored in a file as the rows that differ.

A table of n-gram attention has a row for each possible n-gram, and a short text fills or changes few of them.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

INDICES, ROWS = ".sparse_places", ".sparse_rows"
"""Suffixes of the names of the two tensors that stand for one."""

ALWAYS_DENSE = 4096
"""Tensors of up to this number of values are stored as they are."""

INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers of as many bytes as a float."""


def pack(tensors: Mapping[str, Tensor], base: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors for a file; those that mostly equal a `base`, bit by bit, are stored as the rows that differ."""
    kept: dict[str, Tensor] = {}
    for name, x in tensors.items():
        like = base.get(name)
        if like is not None and x.numel() > ALWAYS_DENSE and x.shape == like.shape and x.dtype == like.dtype:
            indices = (_bits(x) != _bits(like.to(x.device))).any(-1).nonzero()[:, 0]
            kept |= _stored(name, x, indices)
        else:
            kept[name] = x
    return kept


def unpack(kept: Mapping[str, Tensor], base: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the packed tensors; raise ValueError if they are not of this state."""
    tensors = {name: x for name, x in kept.items() if not name.endswith((INDICES, ROWS))}
    for name in [name.removesuffix(INDICES) for name in kept if name.endswith(INDICES)]:
        if name not in base or name + ROWS not in kept:
            raise ValueError(name)
        tensors[name] = _filled(name, base[name], kept[name + INDICES], kept[name + ROWS])
    return tensors


def _filled(name: str, like: Tensor, indices: Tensor, rows: Tensor) -> Tensor:
    """Return a copy of a tensor with other values in some rows; raise ValueError if they do not fit."""
    if indices.dtype != torch.long or indices.ndim != 1:
        raise ValueError(name)
    whole = like.detach().cpu().to(rows.dtype, copy=True).contiguous()
    into = _rows(whole)
    if rows.shape != (len(indices), into.shape[1]) or (
        len(indices) and not 0 <= int(indices.min()) <= int(indices.max()) < len(into)
    ):
        raise ValueError(name)
    into[indices] = rows
    return whole


def _stored(name: str, x: Tensor, indices: Tensor) -> dict[str, Tensor]:
    """Return some rows of a tensor, or if they are at least half of it, all of it."""
    rows = _rows(x)
    return {name + INDICES: indices, name + ROWS: rows[indices]} if 2 * len(indices) < len(rows) else {name: x}


def _rows(x: Tensor) -> Tensor:
    """Return a view as rows: the values of an entry in a table (B, H, R, V), or single values."""
    return x.reshape(-1, x.shape[-1] if x.ndim == 4 else 1)


def _bits(x: Tensor) -> Tensor:
    """Return the bits of each value of each row as an integer: 0.0 and -0.0 are equal numbers of different bits."""
    rows = _rows(x)
    return rows.view(INTEGERS[x.element_size()]) if x.is_floating_point() else rows
