"""`block_sparse.attend` without a GPU, for tests: one operation that reads the lists of blocks as a GPU's kernels do.

A block that is missing in a list, or in the wrong one, changes the result. Under FakeTensorMode nothing is computed, so
operations and memory are counted as on a GPU.
"""

from typing import Any

import torch
from torch import Tensor

from lmlong.attention.base import at_least_float32
from lmlong.attention.key_blocks import BLOCK, BlockList, VisibleKeys


@torch.library.custom_op("lmlong::read_blocks", mutates_args=())
def read_blocks(q: Tensor, k: Tensor, v: Tensor, visible: list[Tensor], lists: list[Tensor]) -> Tensor:
    weights = _weights(q, k, _mask(visible, lists[:4]))
    return (weights @ _of_each_query(v, q)).to(q.dtype)


@torch.library.custom_op("lmlong::read_blocks_backward", mutates_args=())
def read_blocks_backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, visible: list[Tensor], lists: list[Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    weights = _weights(q, k, _mask(visible, lists[:4]))
    # kernels compute dq by the lists of a block of queries, dk and dv by those of a block of keys
    by_key = _weights(q, k, _mask(visible, lists[4:], by_key=True))
    dy, keys, values = dy.to(weights), _of_each_query(k, q), _of_each_query(v, q)
    dweights, scale = dy @ values.mT, q.shape[3] ** -0.5
    mean = (weights * dweights).sum(3, keepdim=True)
    dq = weights * (dweights - mean) @ keys * scale
    dk = (by_key * (dweights - mean)).mT @ q.to(weights) * scale
    dv = by_key.mT @ dy
    dk, dv = (x.unflatten(1, (k.shape[1], -1)).sum(2) for x in (dk, dv))
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _weights(q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
    """Return the weights (B, H, T, S) of all pairs."""
    keys = _of_each_query(k, q)
    return (q.to(keys) @ keys.mT * q.shape[3] ** -0.5).masked_fill(~mask, -torch.inf).softmax(3)


def _of_each_query(x: Tensor, q: Tensor) -> Tensor:
    """Return keys or values for each query head, in at least float32."""
    return x.to(at_least_float32(x.dtype)).repeat_interleave(q.shape[1] // x.shape[1], dim=1)


def _mask(visible: list[Tensor], lists: list[Tensor], by_key: bool = False) -> Tensor:
    """Return the mask (B, 1, T, S) of the pairs that kernels compute."""
    partial, full = BlockList(*lists[:2]), BlockList(*lists[2:])
    seen = VisibleKeys(*visible).mask()

    def pairs(blocks: BlockList) -> Tensor:
        listed = torch.arange(blocks.columns.shape[3]) < blocks.length[..., None]
        dense = torch.zeros_like(listed).scatter(3, blocks.columns.long(), listed)[:, 0]
        dense = dense.mT if by_key else dense
        return dense.repeat_interleave(BLOCK, 1).repeat_interleave(BLOCK, 2)[:, : seen.shape[1], : seen.shape[2]]

    return ((seen & pairs(partial)) | pairs(full))[:, None]


@read_blocks.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, visible: list[Tensor], lists: list[Tensor]) -> Tensor:
    return q.new_empty(*q.shape[:3], v.shape[3])


@read_blocks_backward.register_fake
def _(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, visible: list[Tensor], lists: list[Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    q, k, v, visible, lists = inputs
    ctx.visible = len(visible)
    ctx.save_for_backward(q, k, v, *visible, *lists)


def _backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    q, k, v, *rest = ctx.saved_tensors
    dq, dk, dv = read_blocks_backward(dy, q, k, v, rest[: ctx.visible], rest[ctx.visible :])
    return dq, dk, dv, [None] * ctx.visible, [None] * (len(rest) - ctx.visible)


read_blocks.register_autograd(_backward, setup_context=_save)
