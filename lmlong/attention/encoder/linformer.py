"""Linformer (Wang et al. 2020): softmax(Q (E K)^T / sqrt(D)) F V, which costs k n instead of n^2.

E and F project keys and values from T tokens to k slots: by a matrix, by pooling or by a convolution.

B batch, H heads, T time, D head dim, n longest input, k slots.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention

from lmlong import recipe
from lmlong.attention.encoder.base import EncoderAttention
from lmlong.errors import UsageError


class Projection(nn.Module, ABC):
    """(B, H, T, D) -> (B, H, k, D), over the tokens where `mask` (B, T) is true, or over all tokens if None."""

    @abstractmethod
    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor: ...

    @abstractmethod
    def definition(self, x: Tensor) -> Tensor:
        """Return the slots (k, D) of one head of one row (T, D), by the formula."""

    def filled(self, mask: Tensor | None) -> Tensor | None:
        """Return (B, k), true for slots that hold a token of the mask; None if all slots do."""
        return None


class MatrixProjection(Projection):
    """E x, with a column of E for each position and a row for each slot; shorter inputs use the first columns."""

    def __init__(self, slots: int, longest: int, head_dim: int):
        super().__init__()
        # for an input of full length, slots then have about the same scale as tokens
        self.matrix = nn.Parameter(torch.randn(slots, longest) * longest**-0.5)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        return self.matrix[:, : x.shape[2]] @ _blank(x, mask)

    def definition(self, x: Tensor) -> Tensor:
        return self.matrix[:, : len(x)] @ x


class SlotPooling(Projection):
    """A projection whose slots are neighbouring tokens."""

    def __init__(self, slots: int, longest: int, head_dim: int):
        super().__init__()
        self.slot_tokens = longest // slots

    def filled(self, mask: Tensor | None) -> Tensor | None:
        return None if mask is None else _in_slots(mask, 1, self.slot_tokens).any(2)


class MeanPooling(SlotPooling):
    """The mean of the tokens of each slot."""

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        total = _in_slots(_blank(x, mask), 2, self.slot_tokens).sum(3)
        counted = x.new_ones(1, x.shape[2], dtype=torch.bool) if mask is None else mask
        count = _in_slots(counted, 1, self.slot_tokens).sum(2)
        return total / count.clamp(min=1)[:, None, :, None]

    def definition(self, x: Tensor) -> Tensor:
        return torch.stack([part.mean(0) for part in x.split(self.slot_tokens)])


class MaxPooling(SlotPooling):
    """The maximum over the tokens of each slot, for each feature."""

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        lowest = torch.finfo(x.dtype).min
        largest = _in_slots(_blank(x, mask, lowest), 2, self.slot_tokens, lowest).amax(3)
        return _blank(largest, self.filled(mask))

    def definition(self, x: Tensor) -> Tensor:
        return torch.stack([part.amax(0) for part in x.split(self.slot_tokens)])


class ConvolutionProjection(SlotPooling):
    """A convolution over time and features, as wide as its stride: each slot sums W_r x_r over its tokens."""

    def __init__(self, slots: int, longest: int, head_dim: int):
        super().__init__(slots, longest, head_dim)
        scale = (self.slot_tokens * head_dim) ** -0.5
        self.weight = nn.Parameter(torch.randn(self.slot_tokens, head_dim, head_dim) * scale)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        parts = _in_slots(_blank(x, mask), 2, self.slot_tokens)
        return torch.einsum("bhkrd,rde->bhke", parts, self.weight)

    def definition(self, x: Tensor) -> Tensor:
        parts = x.split(self.slot_tokens)
        return torch.stack([sum(token @ w for token, w in zip(part, self.weight, strict=False)) for part in parts])


PROJECTIONS: dict[str, Callable[[int, int, int], Projection]] = {
    "linear": MatrixProjection,
    "mean": MeanPooling,
    "max": MaxPooling,
    "conv": ConvolutionProjection,
}
"""(slots, longest input, head dim) -> the projection."""


class Projections(nn.Module):
    """The projections E and F of one layer: each is one projection for all heads, or one for each head.

    Layers that share projections hold the same object.
    """

    key: Sequence[Projection]
    value: Sequence[Projection]

    def __init__(self, key: Sequence[Projection], value: Sequence[Projection]):
        super().__init__()
        self.key = nn.ModuleList(key)  # type: ignore[assignment]
        self.value = self.key if value is key else nn.ModuleList(value)  # type: ignore[assignment]

    def forward(self, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return projected keys and values (B, H, k, D), and a mask (B or 1, 1 or H, k) of the slots that hold a token,
        or None if all do. Heads with fewer slots are padded with empty ones."""
        keys, values = _project(self.key, k, mask), _project(self.value, v, mask)
        filled = [project.filled(mask) for project in self.key]
        sizes = [part.shape[2] for part in keys]
        most = max(sizes)
        if min(sizes) == most and all(slots is None for slots in filled):
            return torch.cat(keys, dim=1), torch.cat(values, dim=1), None
        keys, values = ([pad(part, (0, 0, 0, most - part.shape[2])) for part in parts] for parts in (keys, values))
        rows = (
            k.new_ones(1, size, dtype=torch.bool) if slots is None else slots
            for slots, size in zip(filled, sizes, strict=True)
        )
        exists = torch.stack([pad(slots, (0, most - slots.shape[1])) for slots in rows], dim=1)
        return torch.cat(keys, dim=1), torch.cat(values, dim=1), exists


def _project(projections: Sequence[Projection], x: Tensor, mask: Tensor | None) -> list[Tensor]:
    """Return the slots that each projection computes for its heads."""
    return [project(heads, mask) for project, heads in zip(projections, x.chunk(len(projections), 1), strict=True)]


class Linformer(EncoderAttention):
    """Softmax over k slots. Each slot mixes all positions, so no mask can make it causal."""

    def __init__(self, longest: int, projections: Projections):
        super().__init__()
        self.longest, self.projections = longest, projections

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        if k.shape[2] > self.longest:
            raise UsageError(
                f"{k.shape[2]:,} tokens: Linformer's projections E and F were built for inputs of up to "
                f"{self.longest:,} tokens. Cut the input, or build it with a larger `longest`."
            )
        keys, values, filled = self.projections(k, v, mask)
        return scaled_dot_product_attention(q, keys, values, attn_mask=None if filled is None else filled[:, :, None])

    def definition(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads = q.shape[1]
        key, value = ([*side] * (heads // len(side)) for side in (self.projections.key, self.projections.value))
        outputs = []
        for head in range(heads):
            keys, values = key[head].definition(k[0, head]), value[head].definition(v[0, head])
            outputs.append((q[0, head] @ keys.mT / q.shape[-1] ** 0.5).softmax(-1) @ values)
        return torch.stack(outputs)[None]


def linformer_layers(
    longest: Sequence[int], heads: int, head_dim: int, options: recipe.Linformer
) -> list[EncoderAttention]:
    """Return the Linformer attention of each layer, for inputs of up to `longest` tokens."""
    if misfit := options.misfit(longest, heads):
        raise UsageError(": ".join(misfit))
    shapes = list(zip(options.slots(len(longest), heads), longest, strict=True))
    if options.sharing == "layerwise":
        projections = [_projections(*shapes[0], head_dim, options)] * len(shapes)
    else:
        projections = [_projections(*shape, head_dim, options) for shape in shapes]
    return [Linformer(length, shared) for length, shared in zip(longest, projections, strict=True)]


def _projections(slots: list[int], longest: int, head_dim: int, options: recipe.Linformer) -> Projections:
    """Return the projections of one layer, with the number of slots of each head."""
    counts = slots if options.sharing == "none" else slots[:1]
    make = PROJECTIONS[options.projection]
    key = [make(count, longest, head_dim) for count in counts]
    if options.sharing in ("key-value", "layerwise"):
        return Projections(key, key)
    return Projections(key, [make(count, longest, head_dim) for count in counts])


def _blank(x: Tensor, mask: Tensor | None, value: float = 0) -> Tensor:
    """Return x (B, H, T, D) with `value` where `mask` (B, T) is false."""
    return x if mask is None else x.masked_fill(~mask[:, None, :, None], value)


def _in_slots(x: Tensor, axis: int, tokens: int, fill: float = 0) -> Tensor:
    """Split an axis of time into slots of `tokens` tokens, the last one padded."""
    missing = -x.shape[axis] % tokens
    after = [0, 0] * (x.ndim - 1 - axis) + [0, missing]
    return pad(x, after, value=fill).unflatten(axis, (-1, tokens))
