"""The causal scan by Triton kernels, as one operation of autograd and of torch.compile.

Queries, keys, values, outputs, denominators and the states between segments are saved for the backward pass. Tensors
over tokens have the memory layout of the model, (B, T, H, ...), and so do all results.

B batch, H heads, T time, K key dim, F features, V value dim, G segments.
"""

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from torch.library import triton_op, wrap_triton

from lmlong.attention.feature_maps import Cosine, Elu, FeatureMap, Relu
from lmlong.attention.linear.triton import backward, forward
from lmlong.attention.linear.triton.tiles import TILE
from lmlong.attention.scan import ScanInputs

FUSED: dict[type, str] = {Elu: "elu", Relu: "relu", Cosine: "cosine"}
"""Feature maps that the kernels compute. Other features are computed by torch, and saved."""

MIN_PROGRAMS = 264
"""Minimum number of segments over all heads and rows: two for each of the 132 multiprocessors of an H100."""

MAX_SEGMENT = 1024
"""Maximum tokens in a segment: the gradients of log decays are sums over a segment of terms that mostly cancel."""

LAUNCH_OPTIONS = {"num_warps": 8, "num_stages": 1}
"""Threads and buffers of a program. The largest program must fit into a multiprocessor."""

ACCUMULATE_BLOCK = 1024
"""Numbers of a state that one program of `accumulate_states` processes."""


def linear_scan(features: FeatureMap, state: Tensor, x: ScanInputs) -> tuple[Tensor, Tensor]:
    """Return outputs (B, H, T, V) and the state (B, H, F, V + 1) after, given the state before, in float32."""
    q, k, v, document_starts, log_decay, _ = x
    feature_map = FUSED.get(type(features), "identity")
    if type(features) not in FUSED:
        with torch.autocast(q.device.type, enabled=False):
            q, k = features.query(q), features.key(k)
    y, state, *_ = _scan_op(q, k, v.to(q.dtype), document_starts, log_decay, state, feature_map)
    return y.to(v.dtype), state


class LaunchGrid(NamedTuple):
    """The division of the work among programs, and the arguments that all kernels share."""

    lines: int  # B H
    segments: int
    sizes: tuple[int, ...]  # T, H, K, F, V, G, tiles in a segment
    blocks: tuple[str, int, int]  # the feature map, and F and V rounded up to what `tl.dot` takes

    @property
    def programs(self) -> tuple[int]:
        return (self.lines * self.segments,)


def launch_grid(k: Tensor, v: Tensor, features: int, feature_map: str) -> LaunchGrid:
    (batch, heads, time, key_dim), value_dim = k.shape, v.shape[3]
    lines, tiles = batch * heads, triton.cdiv(time, TILE.value)
    segment_tiles = min(triton.cdiv(tiles, triton.cdiv(MIN_PROGRAMS, lines)), MAX_SEGMENT // TILE.value)
    segments = triton.cdiv(tiles, segment_tiles)
    sizes = (time, heads, key_dim, features, value_dim, segments, segment_tiles)
    blocks = (feature_map, *(max(16, triton.next_power_of_2(size)) for size in (features, value_dim)))
    return LaunchGrid(lines, segments, sizes, blocks)


@triton_op("lmlong::linear_scan", mutates_args=())
def _scan_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    document_starts: Tensor | None,
    log_decay: Tensor | None,
    state: Tensor,
    feature_map: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the outputs and the state after them, and for the backward pass the denominators (B, T, H), the states
    between segments (B H, G + 1, F, V + 1) and the decay over each segment (B H, G)."""
    q, k, v, document_starts, log_decay = _kernel_layout(q, k, v, document_starts, log_decay)
    grid = launch_grid(k, v, state.shape[2], feature_map)
    y = _empty_tokens_like(v)
    denominators = state.new_empty(y.shape[0], y.shape[2], y.shape[1])
    states = state.new_empty(grid.lines, grid.segments + 1, *state.shape[2:])
    states[:, 0] = state.flatten(0, 1)
    decays = state.new_empty(grid.lines, grid.segments)
    strides, rest = (q.stride(2), k.stride(2), v.stride(2)), (*grid.sizes, *grid.blocks)
    wrap_triton(forward.segment_states)[grid.programs](
        k, v, document_starts, log_decay, states, decays, *strides[1:], *rest, **LAUNCH_OPTIONS
    )
    _accumulate_states(states, decays, backwards=False)
    wrap_triton(forward.segment_outputs)[grid.programs](
        q, k, v, document_starts, log_decay, states, y, denominators, *strides, *rest, **LAUNCH_OPTIONS
    )
    return y, states[:, -1].unflatten(0, state.shape[:2]).clone(), denominators, states, decays


@triton_op("lmlong::linear_scan_backward", mutates_args=())
def _scan_backward_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    document_starts: Tensor | None,
    log_decay: Tensor | None,
    y: Tensor,
    denominators: Tensor,
    states: Tensor,
    decays: Tensor,
    dy: Tensor,
    dstate: Tensor,
    feature_map: str,
    needs_dlog_decay: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v, log_decay (empty unless needed) and the state."""
    q, k, v, document_starts, log_decay = _kernel_layout(q, k, v, document_starts, log_decay)
    dy = _token_layout(dy.to(y.dtype))
    grid = launch_grid(k, v, dstate.shape[2], feature_map)
    dq, dk, dv = _empty_tokens_like(q), _empty_tokens_like(k), _empty_tokens_like(v)
    pairs = torch.empty_like(denominators) if needs_dlog_decay else None
    dstates = torch.empty_like(states)
    dstates[:, -1] = dstate.flatten(0, 1)
    outputs, strides = (y, denominators, dy), (q.stride(2), k.stride(2), v.stride(2), dy.stride(2))
    rest = (*grid.sizes, *grid.blocks)
    wrap_triton(backward.segment_dstates)[grid.programs](
        q, document_starts, log_decay, *outputs, dstates, q.stride(2), dy.stride(2), *rest, **LAUNCH_OPTIONS
    )
    _accumulate_states(dstates, decays, backwards=True)
    wrap_triton(backward.backward_q)[grid.programs](
        q, k, v, document_starts, log_decay, states, *outputs, dq, pairs, *strides, *rest, **LAUNCH_OPTIONS
    )
    wrap_triton(backward.backward_kv)[grid.programs](
        q, k, v, document_starts, log_decay, states, dstates, *outputs, dk, dv, pairs, *strides, *rest, **LAUNCH_OPTIONS
    )
    dlog_decay = denominators.new_empty(0) if pairs is None else pairs.mT
    return dq, dk, dv, dlog_decay, dstates[:, 0].unflatten(0, dstate.shape[:2]).clone()


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, _, ctx.feature_map = inputs
    y, _, denominators, states, decays = output
    ctx.needs_dlog_decay = tensors[4] is not None and ctx.needs_input_grad[4]
    ctx.mark_non_differentiable(denominators, states, decays)
    ctx.save_for_backward(*tensors, y, denominators, states, decays)


def _backward(ctx: Any, dy: Tensor, dstate: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    *inputs, y, denominators, states, decays = ctx.saved_tensors
    dq, dk, dv, dlog_decay, dstate = _scan_backward_op(
        *inputs, y, denominators, states, decays, dy, dstate, ctx.feature_map, ctx.needs_dlog_decay
    )
    return dq, dk, dv, None, dlog_decay.to(inputs[4].dtype) if ctx.needs_dlog_decay else None, dstate, None


_scan_op.register_autograd(_backward, setup_context=_setup_context)


def _accumulate_states(states: Tensor, decays: Tensor, backwards: bool) -> None:
    size = states.shape[2] * states.shape[3]
    programs = (len(states), triton.cdiv(size, ACCUMULATE_BLOCK))
    wrap_triton(forward.accumulate_states)[programs](states, decays, decays.shape[1], size, backwards, ACCUMULATE_BLOCK)


def _kernel_layout(
    q: Tensor, k: Tensor, v: Tensor, document_starts: Tensor | None, log_decay: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return the inputs in the layout that kernels read, copied only if their layout differs."""
    document_starts = None if document_starts is None else document_starts.to(torch.uint8).contiguous()
    log_decay = None if log_decay is None else log_decay.mT.contiguous()
    return _token_layout(q), _token_layout(k), _token_layout(v), document_starts, log_decay


def _token_layout(x: Tensor) -> Tensor:
    """Return (B, H, T, ...) with the heads of a token side by side, and all tokens at the same stride."""
    _, _, time, width = x.shape
    stride = x.stride(2)
    return x if x.stride() == (time * stride, width, stride, 1) else x.transpose(1, 2).contiguous().transpose(1, 2)


def _empty_tokens_like(x: Tensor) -> Tensor:
    """Return an empty tensor of the same shape (B, H, T, ...), contiguous as (B, T, H, ...)."""
    return torch.empty_like(x.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)
