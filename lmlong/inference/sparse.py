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


def merged(
    tensors: Mapping[str, Tensor], earlier: Mapping[str, Tensor], later: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return tensors packed against the base of `earlier`, given that `later` is what `pack` returned for them against
    the tensors of `earlier`."""
    kept: dict[str, Tensor] = {}
    for name, x in tensors.items():
        if name + INDICES in later and name + INDICES in earlier:
            kept |= _stored(name, x, torch.cat([earlier[name + INDICES], later[name + INDICES]]).unique())
        else:
            kept[name] = x
    return kept


def unpack(kept: Mapping[str, Tensor], base: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the packed tensors; raise ValueError if they are not of this state."""
    rows, tensors = split(kept)
    for name, indices in of_tables(rows).items():
        if name not in base:
            raise ValueError(name)
        tensors[name] = filled(name, base[name].detach().cpu().clone().contiguous(), indices, rows.get(name + ROWS))
    return tensors


def split(kept: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Divide packed tensors into indices and rows, and whole tensors."""
    rows = {name: x for name, x in kept.items() if name.endswith((INDICES, ROWS))}
    return rows, {name: x for name, x in kept.items() if name not in rows}


def of_tables(rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the indices of rows by the names of their tensors."""
    return {name.removesuffix(INDICES): x for name, x in rows.items() if name.endswith(INDICES)}


def filled(name: str, whole: Tensor, indices: Tensor, rows: Tensor | None) -> Tensor:
    """Write rows into a tensor that nobody else uses, and return it; raise ValueError if they do not fit."""
    if rows is None or indices.dtype != torch.long or indices.ndim != 1:
        raise ValueError(name)
    whole = whole.to(rows.dtype)
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
