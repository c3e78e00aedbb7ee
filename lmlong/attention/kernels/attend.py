"""The causal scan by Triton kernels, as one operation of autograd and of torch.compile.

Kept for the backward pass are queries, keys, values and outputs, a denominator for each token, and the states between
segments. Rows of tokens lie as a model makes them, (B, T, H, width), and so do all that are made here.

B batch, H heads, T time, K key width, F features, E value width, G segments.
"""

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from torch.library import triton_op, wrap_triton

from lmlong.attention import chunked
from lmlong.attention.features import Cosine, Elu, Relu
from lmlong.attention.kernels import backward, forward
from lmlong.attention.kernels.tiles import TILE
from lmlong.attention.spans import Features, Given, Inputs

FUSED: dict[type, str] = {Given: "given", Elu: "elu", Relu: "relu", Cosine: "cosine"}
"""Maps that are computed within the kernels; features of all others are made by torch, and kept."""

PROGRAMS = 264
"""Segments of all heads and rows that are wanted at least: two for each of the 132 processors of an H100."""

LONGEST = 1024
"""Tokens of a segment at most: the gradients of log decays are sums over it of what mostly cancels."""

LAUNCH = {"num_warps": 8, "num_stages": 1}
"""Threads and buffers of a program, of which the largest must fit into a processor."""

CARRIED = 1024
"""Numbers of a state that one program carries along."""


def attend(features: Features, inputs: Inputs, S: Tensor, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What `chunked.attend` gives, which float64 is left to: outputs (B, H, T, E), and the state after them."""
    if S.dtype != torch.float32:
        return chunked.attend(features, inputs, S, z)
    q, k, v, starts, log_decay = inputs
    name = FUSED.get(type(features), "given")
    if type(features) not in FUSED:
        with torch.autocast(q.device.type, enabled=False):
            q, k = features.query(q), features.key(k)
    y, S, z, *_ = scan(q, k, v.to(q.dtype), starts, log_decay, S, z, name)
    return y.to(v.dtype), S, z


class Grid(NamedTuple):
    """How the work is shared out among programs, and the sizes that all kernels are told."""

    lines: int  # B H
    segments: int
    sizes: tuple[int, ...]  # T, H, K, F, E, G, tiles in a segment
    blocks: tuple[str, int, int]  # the feature map, and F and E rounded up to what a product of matrices takes

    @property
    def programs(self) -> tuple[int]:
        return (self.lines * self.segments,)


def share_out(k: Tensor, v: Tensor, S: Tensor, name: str) -> Grid:
    batch, heads, time, width = k.shape
    lines, tiles, (features, values) = batch * heads, triton.cdiv(time, TILE.value), S.shape[2:]
    tiles_of_segment = min(triton.cdiv(tiles, triton.cdiv(PROGRAMS, lines)), LONGEST // TILE.value)
    segments = triton.cdiv(tiles, tiles_of_segment)
    sizes = (time, heads, width, features, values, segments, tiles_of_segment)
    blocks = (name, *(max(16, triton.next_power_of_2(size)) for size in (features, values)))
    return Grid(lines, segments, sizes, blocks)


@triton_op("lmlong::causal_scan", mutates_args=())
def scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Tensor | None,
    log_decay: Tensor | None,
    S: Tensor,
    z: Tensor,
    name: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Outputs and the state after; for the backward pass denominators (B, T, H), states (B H, G + 1, F, E + 1) and
    what segments keep of them (B H, G)."""
    q, k, v, starts, log_decay = _in_rows(q, k, v, starts, log_decay)
    grid = share_out(k, v, S, name)
    y = _rows_like(v)
    denominators = S.new_empty(y.shape[0], y.shape[2], y.shape[1])
    states = S.new_empty(grid.lines, grid.segments + 1, S.shape[2], S.shape[3] + 1)
    states[:, 0] = torch.cat([S, z[..., None]], dim=-1).flatten(0, 1)
    kept = S.new_empty(grid.lines, grid.segments)
    wrap_triton(forward.sum_segments)[grid.programs](
        k, v, starts, log_decay, states, kept, k.stride(2), v.stride(2), *grid.sizes, *grid.blocks, **LAUNCH
    )
    _carry(states, kept, backwards=False)
    strides = (q.stride(2), k.stride(2), v.stride(2))
    wrap_triton(forward.read)[grid.programs](
        q, k, v, starts, log_decay, states, y, denominators, *strides, *grid.sizes, *grid.blocks, **LAUNCH
    )
    after = states[:, -1].unflatten(0, S.shape[:2])
    return y, after[..., :-1].clone(), after[..., -1].clone(), denominators, states, kept


@triton_op("lmlong::causal_scan_slopes", mutates_args=())
def scan_slopes(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Tensor | None,
    log_decay: Tensor | None,
    y: Tensor,
    denominators: Tensor,
    states: Tensor,
    kept: Tensor,
    dy: Tensor,
    dS: Tensor,
    dz: Tensor,
    name: str,
    decays: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of q, k, v, S, z and, where `decays`, log_decay."""
    q, k, v, starts, log_decay = _in_rows(q, k, v, starts, log_decay)
    dy = _row(dy.to(y.dtype))
    grid = share_out(k, v, dS, name)
    dq, dk, dv = _rows_like(q), _rows_like(k), _rows_like(v)
    pairs = torch.empty_like(denominators) if decays else None
    slopes = torch.empty_like(states)
    slopes[:, -1] = torch.cat([dS, dz[..., None]], dim=-1).flatten(0, 1)
    read, strides = (y, denominators, dy), (q.stride(2), k.stride(2), v.stride(2), dy.stride(2))
    rest = (*strides, *grid.sizes, *grid.blocks)
    wrap_triton(backward.sum_slopes)[grid.programs](
        q, starts, log_decay, *read, slopes, q.stride(2), dy.stride(2), *grid.sizes, *grid.blocks, **LAUNCH
    )
    _carry(slopes, kept, backwards=True)
    wrap_triton(backward.slopes_of_queries)[grid.programs](
        q, k, v, starts, log_decay, states, *read, dq, pairs, *rest, **LAUNCH
    )
    wrap_triton(backward.slopes_of_keys)[grid.programs](
        q, k, v, starts, log_decay, states, slopes, *read, dk, dv, pairs, *rest, **LAUNCH
    )
    before = slopes[:, 0].unflatten(0, dS.shape[:2])
    none = denominators.new_empty(0)
    return dq, dk, dv, none if pairs is None else pairs.mT, before[..., :-1].clone(), before[..., -1].clone()


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, starts, log_decay, S, z, ctx.name = inputs
    y, _, _, denominators, states, kept = output
    ctx.decays = log_decay is not None and ctx.needs_input_grad[4]
    ctx.mark_non_differentiable(denominators, states, kept)
    ctx.set_materialize_grads(False)
    ctx.like = S.shape, z.shape
    ctx.save_for_backward(q, k, v, starts, log_decay, y, denominators, states, kept)


def _slopes(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
    *inputs, y, denominators, states, kept = ctx.saved_tensors
    dy, dS, dz = gradients[:3]
    dy = torch.zeros_like(y) if dy is None else dy
    dS, dz = (states.new_zeros(shape) if x is None else x for x, shape in zip((dS, dz), ctx.like, strict=True))
    slopes = scan_slopes(*inputs, y, denominators, states, kept, dy, dS, dz, ctx.name, ctx.decays)
    dq, dk, dv, d_log_decay, dS, dz = slopes
    return dq, dk, dv, None, d_log_decay.to(inputs[4].dtype) if ctx.decays else None, dS, dz, None


scan.register_autograd(_slopes, setup_context=_keep)


def _carry(states: Tensor, kept: Tensor, backwards: bool) -> None:
    numbers = states.shape[2] * states.shape[3]
    programs = (len(states), triton.cdiv(numbers, CARRIED))
    wrap_triton(forward.carry)[programs](states, kept, kept.shape[1], numbers, backwards, CARRIED)


def _in_rows(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None, log_decay: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Inputs as kernels read them, copied only where they do not lie so already."""
    starts = None if starts is None else starts.to(torch.uint8).contiguous()
    return _row(q), _row(k), _row(v), starts, None if log_decay is None else log_decay.mT.contiguous()


def _row(x: Tensor) -> Tensor:
    """(B, H, T, width), the heads of a token side by side, and its rows equally far from each other."""
    _, _, time, width = x.shape
    stride = x.stride(2)
    return x if x.stride() == (time * stride, width, stride, 1) else x.transpose(1, 2).contiguous().transpose(1, 2)


def _rows_like(x: Tensor) -> Tensor:
    """Room for as many rows, (B, H, T, width), none of them apart."""
    return torch.empty_like(x.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)
