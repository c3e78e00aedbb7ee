"""Tensors that are mostly one number, kept in a file as the rows in which they are not.

A table of n-gram attention has a row for each n-gram that a text may have, and a short text has few.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

PLACES, ROWS = ".sparse_places", ".sparse_rows"
"""Ends of the names of the two tensors that stand for one."""

SMALL = 4096
"""Numbers up to which a tensor is kept as it is."""


def pack(tensors: Mapping[str, Tensor], empty: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors for a file, those that are mostly as in an `empty` state by what differs from it."""
    kept = {}
    for name, x in tensors.items():
        if x.numel() > SMALL and x.shape == empty[name].shape and x.dtype == empty[name].dtype:
            rows = _rows(x)
            places = (rows != _rows(empty[name].to(x.device))).any(-1).nonzero()[:, 0]
            if 2 * len(places) < len(rows):
                kept[name + PLACES], kept[name + ROWS] = places, rows[places]
                continue
        kept[name] = x
    return kept


def unpack(kept: Mapping[str, Tensor], empty: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors that were packed; ValueError if they are not of this state."""
    tensors = {name: x for name, x in kept.items() if not name.endswith((PLACES, ROWS))}
    for name in (name.removesuffix(PLACES) for name in kept if name.endswith(PLACES)):
        places, rows = kept[name + PLACES], kept.get(name + ROWS)
        if name not in empty or rows is None or places.dtype != torch.long or places.ndim != 1:
            raise ValueError(name)
        whole = empty[name].detach().cpu().to(rows.dtype, copy=True).contiguous()
        into = _rows(whole)
        if rows.shape != (len(places), into.shape[1]) or (
            len(places) and not 0 <= int(places.min()) <= int(places.max()) < len(into)
        ):
            raise ValueError(name)
        into[places] = rows
        tensors[name] = whole
    return tensors


def _rows(x: Tensor) -> Tensor:
    """Return a view (rows, numbers of each): the values of a place in a table (B, H, R, V), or single numbers."""
    return x.reshape(-1, x.shape[-1] if x.ndim == 4 else 1)
