"""The causal scan by Triton kernels, as one operation of autograd and of torch.compile.

Queries, keys, values, outputs, denominators and the states between segments are saved for the backward pass. Tensors
over tokens have the memory layout of the model, (B, T, H, ...), and so do all results.

B batch, H heads, T time, F features, V value dim, N tiles, G segments.
"""

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from torch.library import triton_op, wrap_triton
from torch.nn.functional import pad

from lmlong.attention.feature_maps import Elu, FeatureMap, Relu
from lmlong.attention.linear.triton import passes, states
from lmlong.attention.linear.triton.blocks import launch_of
from lmlong.attention.linear.triton.tiles import TILE
from lmlong.attention.scan import ScanInputs

FUSED: dict[type, str] = {Elu: "elu", Relu: "relu"}
"""Feature maps that the kernels compute. Other features are computed by torch, and saved."""

MIN_PROGRAMS = 264
"""Minimum number of segments over all heads and rows: two for each of the 132 multiprocessors of an H100."""

MAX_SEGMENT = 1024
"""Maximum tokens in a segment: the gradients of log decays are sums over a segment of terms that mostly cancel."""

MAX_STATES = 2**29
"""Maximum bytes of the states of all tiles. A longer text is computed in parts."""

ALIGNED = 16
"""Features that torch computes are padded with zeros to a multiple of this, so that kernels load whole vectors."""

STATE_BLOCK = 256
"""Numbers of a state that one program of `accumulate_states` processes."""


def linear_scan(features: FeatureMap, state: Tensor, x: ScanInputs) -> tuple[Tensor, Tensor]:
    """Return outputs (B, H, T, V) and the state (B, H, F, V + 1) after, given the state before, in float32."""
    q, k, v, document_starts, log_decay, _ = x
    feature_map, size, padding = FUSED.get(type(features), "identity"), state.shape[2], 0
    if type(features) not in FUSED:
        with torch.autocast(q.device.type, enabled=False):
            q, k = features.query(q), features.key(k)
        if padding := -size % ALIGNED:
            q, k, state = pad(q, (0, padding)), pad(k, (0, padding)), pad(state, (0, 0, 0, padding))
    rounded, outputs = v.to(q.dtype), []
    step = max(1, MAX_STATES // (state.numel() * q.element_size())) * TILE.value
    for begin in range(0, q.shape[2], step):
        tokens = slice(begin, begin + step)
        starts = None if document_starts is None else document_starts[:, tokens]
        gate = None if log_decay is None else log_decay[:, :, tokens]
        inputs = (part[:, :, tokens] for part in (q, k, rounded))
        y, state, *_ = _scan_op(*inputs, starts, gate, state, feature_map)
        outputs.append(y)
    y = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)
    return y.to(v.dtype), state[:, :, :size] if padding else state


class TiledScan:
    """The sizes of a scan, its division into tiles and segments, and the launches of its kernels."""

    def __init__(self, v: Tensor, features: int, feature_map: str):
        (batch, self.heads, self.time, self.values), self.features = v.shape, features
        self.batch_heads, self.tiles = batch * self.heads, triton.cdiv(self.time, TILE.value)
        segment_tiles = triton.cdiv(self.tiles, triton.cdiv(MIN_PROGRAMS, self.batch_heads))
        self.segment_tiles = min(segment_tiles, MAX_SEGMENT // TILE.value)
        self.segments = triton.cdiv(self.tiles, self.segment_tiles)
        self.dtype, self.feature_map = v.dtype, feature_map

    def launch(self, kernel: Any, parts: int, *arguments: Any, **constants: Any) -> None:
        """Launch a kernel for `parts` tiles or segments of each head, and all blocks of each."""
        launch = launch_of(kernel.__name__, self.features, self.values, self.dtype)
        sizes = {"T": self.time, "H": self.heads, "N": self.tiles, "F": self.features, "V": self.values}
        constants |= {"FEATURE_MAP": self.feature_map, **launch.options}
        wrap_triton(kernel)[(self.batch_heads * parts * launch.blocks,)](*arguments, **sizes, **constants)

    def border_states(self, inputs: "StateInputs", state: Tensor, decays: Tensor) -> tuple[Tensor, Tensor]:
        """Return the states between segments (B H, G + 1, F, V + 1) from the state before the first, and the state
        after the last. Forwards, store the decay of each segment; backwards, exchange before and after."""
        borders = state.new_empty(self.batch_heads, self.segments + 1, *state.shape[2:])
        last, size = torch.empty_like(state), state[0, 0].numel()
        self._scan_states(inputs, borders, decays, None, None)
        wrap_triton(states.accumulate_states)[(self.batch_heads, triton.cdiv(size, STATE_BLOCK))](
            *(state, borders, decays, last, self.segments, size), BACKWARDS=inputs.backwards, BLOCK=STATE_BLOCK
        )
        return borders, last

    def tile_states(self, inputs: "StateInputs", borders: Tensor, decays: Tensor) -> tuple[Tensor, Tensor]:
        """Return the states before each tile, or backwards after each: S (B H, N, F, V) and z (B H, N, F)."""
        z = borders.new_empty(self.batch_heads, self.tiles, self.features)
        S = z.new_empty(*z.shape, self.values, dtype=self.dtype)
        self._scan_states(inputs, borders, decays, S, z)
        return S, z

    def _scan_states(
        self, x: "StateInputs", borders: Tensor, decays: Tensor, S: Tensor | None, z: Tensor | None
    ) -> None:
        arguments = (*x, borders, decays, S, z, x.qk.stride(2), x.values.stride(2))
        sizes = {"G": self.segments, "tiles": self.segment_tiles, "BACKWARDS": x.backwards}
        self.launch(states.scan_states, self.segments, *arguments, **sizes)


class StateInputs(NamedTuple):
    """What a state is the sum of: products of keys and values, or backwards, of queries and dy."""

    qk: Tensor
    values: Tensor
    denominators: Tensor | None
    dm: Tensor | None
    document_starts: Tensor | None
    log_decay: Tensor | None

    @property
    def backwards(self) -> bool:
        return self.dm is not None


def scan(
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
    q, k, v, *gates = _kernel_layout(q, k, v, document_starts, log_decay)
    tiled, keys = TiledScan(v, state.shape[2], feature_map), StateInputs(k, v, None, None, *gates)
    decays = state.new_empty(tiled.batch_heads, tiled.segments)
    borders, after = tiled.border_states(keys, state.contiguous(), decays)
    tile_states = tiled.tile_states(keys, borders, decays)
    y, denominators = _empty_tokens_like(v), state.new_empty(v.shape[0], v.shape[2], v.shape[1])
    strides = q.stride(2), k.stride(2), v.stride(2)
    tiled.launch(passes.tile_outputs, tiled.tiles, q, k, v, *gates, *tile_states, y, denominators, *strides)
    return y, after, denominators, borders, decays


def scan_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    document_starts: Tensor | None,
    log_decay: Tensor | None,
    y: Tensor,
    denominators: Tensor,
    borders: Tensor,
    decays: Tensor,
    dy: Tensor,
    dafter: Tensor,
    feature_map: str,
    needs_dlog_decay: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v, log_decay (empty unless needed) and the state."""
    q, k, v, *gates = _kernel_layout(q, k, v, document_starts, log_decay)
    dy, dm = _token_layout(dy.to(y.dtype)), torch.empty_like(denominators)
    tiled = TiledScan(v, dafter.shape[2], feature_map)
    tiled.launch(passes.denominator_grads, tiled.tiles, y, denominators, dy, dm, dy.stride(2))
    keys, queries = StateInputs(k, v, None, None, *gates), StateInputs(q, dy, denominators, dm, *gates)
    dborders, dbefore = tiled.border_states(queries, dafter.contiguous(), decays)
    S, z = tiled.tile_states(keys, borders, decays)
    dS, dz = tiled.tile_states(queries, dborders, decays)
    dq, dk, dv = _empty_tokens_like(q), _empty_tokens_like(k), _empty_tokens_like(v)
    pairs = dm.new_empty(*dm.shape, launch_of("backward_qk", tiled.features, tiled.values, v.dtype).blocks)
    strides = q.stride(2), k.stride(2), v.stride(2), dy.stride(2)
    tiled.launch(
        passes.backward_qk,
        tiled.tiles,
        *(q, k, v, *gates, S, z, dS, dz, denominators, dm, dy, dq, dk, pairs if needs_dlog_decay else None, *strides),
    )
    strides_v = q.stride(2), k.stride(2), dy.stride(2)
    tiled.launch(passes.backward_v, tiled.tiles, q, k, *gates, dS, denominators, dy, dv, *strides_v)
    dlog_decay = torch.empty_like(dm) if needs_dlog_decay else dm.new_empty(0)
    if needs_dlog_decay:
        sizes = tiled.time, tiled.heads, tiled.tiles, tiled.segments, tiled.segment_tiles, borders[0, 0].numel()
        wrap_triton(passes.decay_grads)[(tiled.batch_heads * tiled.segments,)](
            *(pairs, borders, dborders, dlog_decay, *sizes), BLOCKS=pairs.shape[-1], BLOCK=STATE_BLOCK
        )
        dlog_decay = dlog_decay.mT
    return dq, dk, dv, dlog_decay, dbefore


_scan_op: Any = triton_op("lmlong::linear_scan", scan, mutates_args=())
_scan_backward_op = triton_op("lmlong::linear_scan_backward", scan_backward, mutates_args=())


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, _, ctx.feature_map = inputs
    y, _, *rest = output
    ctx.needs_dlog_decay = tensors[4] is not None and ctx.needs_input_grad[4]
    ctx.mark_non_differentiable(*rest)
    ctx.save_for_backward(*tensors, y, *rest)


def _backward(ctx: Any, dy: Tensor, dafter: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors
    dq, dk, dv, dlog_decay, dbefore = _scan_backward_op(*saved, dy, dafter, ctx.feature_map, ctx.needs_dlog_decay)
    return dq, dk, dv, None, dlog_decay.to(saved[4].dtype) if ctx.needs_dlog_decay else None, dbefore, None


_scan_op.register_autograd(_backward, setup_context=_setup_context)


def _kernel_layout(
    q: Tensor, k: Tensor, v: Tensor, document_starts: Tensor | None, log_decay: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return the inputs in the layout that kernels read, copied only if their layout differs."""
    if document_starts is not None:
        document_starts = document_starts.to(torch.uint8).contiguous()  # torch.compile views no bool as bytes
    log_decay = None if log_decay is None else log_decay.mT.contiguous()
    return _token_layout(q), _token_layout(k), _token_layout(v), document_starts, log_decay


def _token_layout(x: Tensor) -> Tensor:
    """Return (B, H, T, ...) with the heads of a token side by side, and all tokens at the same stride."""
    batch, _, time, width = x.shape
    row, *token = x.stride()
    together = token == [width, x.stride(2), 1] and (batch == 1 or row == time * x.stride(2))
    return x if together else x.transpose(1, 2).contiguous().transpose(1, 2)


def _empty_tokens_like(x: Tensor) -> Tensor:
    """Return an empty tensor of the same shape (B, H, T, ...), contiguous as (B, T, H, ...)."""
    return torch.empty_like(x.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)
