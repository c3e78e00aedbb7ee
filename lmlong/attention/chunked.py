"""The causal scan by torch's products of matrices: the chunks of a span side by side, on any device, in any type.

N chunks, B batch, H heads, C tokens in a chunk, T time, F features, E value width.
"""

from functools import partial

import torch
from torch import Tensor

from lmlong.attention import spans
from lmlong.attention.chunks import Chunks, find_borders, find_reach, find_slopes, in_chunks, put, read
from lmlong.attention.spans import SMALLEST, Attend, Done, Features, Inputs, Mapped, Outputs, Slopes


class Chunked:
    """A span in chunks of equal length."""

    def read(self, features: Features, inputs: Inputs, state: Tensor, into: Outputs) -> Tensor:
        fq, fk = features.query(_flat(inputs.q)), features.key(_flat(inputs.k))
        x = _chunks(fq, fk, inputs)
        reach = find_reach(inputs.starts, inputs.log_decay, fq.dtype, state.dtype)
        borders = find_borders(x, reach, state)
        numerator, denominator = read(x, reach, borders)
        put(into.denominators, denominator.clamp_(min=SMALLEST))
        put(into.y, numerator / denominator[..., None])
        # cloned, for a view would keep the states of all chunks alive
        return borders[-1].clone()

    def find_slopes(self, features: Features, weights: list[Tensor], done: Done, into: Slopes) -> Tensor:
        inputs, outputs, state, dy, dstate = done
        mapped = Mapped(features, weights, _flat(inputs.q), _flat(inputs.k))
        x = _chunks(mapped.fq, mapped.fk, inputs)
        reach = find_reach(inputs.starts, inputs.log_decay, mapped.fq.dtype, dstate.dtype)
        borders = find_borders(x, reach, state)
        y, m = map(in_chunks, outputs)
        m = m.clamp(min=SMALLEST)  # the last chunk is filled up with zeros
        dn = in_chunks(dy) / m[..., None]
        dm = (dn * y).sum(-1, keepdim=True).neg_().mul_((m > SMALLEST)[..., None])
        dn = torch.cat([dn, dm], dim=-1).to(x.fq.dtype)
        found = find_slopes(x, reach, borders, dn, dstate, into.inputs.log_decay is not None)
        dq, dk = mapped.back(found.fq.flatten(0, 1), found.fk.flatten(0, 1), into.weights)
        rows = x.v.shape[:2]
        slopes = (dq.unflatten(0, rows), dk.unflatten(0, rows), found.v, None, found.log_decay)
        for place, slope in zip(into.inputs, slopes, strict=True):
            if place is not None and slope is not None:
                put(place, slope)
        return found.S


attend: Attend = partial(spans.attend, Chunked())


def _flat(x: Tensor) -> Tensor:
    """(B, H, T, ...) -> (N B, H, C, ...)."""
    return in_chunks(x).flatten(0, 1)


def _chunks(fq: Tensor, fk: Tensor, inputs: Inputs) -> Chunks:
    """Of features (N B, H, C, F); none for what the last chunk is filled up with."""
    v = in_chunks(inputs.v).to(fq.dtype)
    fq, fk = fq.unflatten(0, v.shape[:2]), fk.unflatten(0, v.shape[:2])
    if missing := len(v) * v.shape[3] - inputs.v.shape[2]:
        real = fk.new_ones(len(v), 1, 1, v.shape[3], 1)
        real[-1, ..., -missing:, :] = 0
        fk = fk * real
    return Chunks(fq, fk, v)
