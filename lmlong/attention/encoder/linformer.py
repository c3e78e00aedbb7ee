"""Linformer (Wang et al. 2020): softmax(Q (E K)^T / sqrt(D)) F V, which costs k n instead of n^2.

B batch, H heads, T time, n longest input, k slots.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention

from lmlong import recipe
from lmlong.attention.encoder.base import EncoderAttention
from lmlong.attention.encoder.projections import PROJECTIONS, Projected, Projection
from lmlong.errors import UsageError


class Projections(nn.Module):
    """The matrices E and F of one layer, each with one projection for all heads or one a head.

    Layers that share them hold the same object.
    """

    def __init__(self, key: Sequence[Projection], value: Sequence[Projection]):
        super().__init__()
        self.key = nn.ModuleList(key)
        self.value = self.key if value is key else nn.ModuleList(value)

    def forward(self, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return projected keys and values (B, H, k, D), and (B or 1, 1 or H, k), true where a slot holds a token;
        None where all do."""
        keys, filled = _projected(self.key, k, mask)
        values, _ = _projected(self.value, v, mask)
        return keys, values, filled


def _projected(projections: nn.ModuleList, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return the slots of all heads, and which hold a token; heads with fewer slots are padded with empty ones."""
    parts = [project(heads, mask) for project, heads in zip(projections, x.chunk(len(projections), 1), strict=True)]
    most = max(part.x.shape[2] for part in parts)
    slots = torch.cat([pad(part.x, (0, 0, 0, most - part.x.shape[2])) for part in parts], dim=1)
    if all(part.filled is None and part.x.shape[2] == most for part in parts):
        return slots, None
    return slots, torch.stack([_padded(part, most) for part in parts], dim=1)


def _padded(part: Projected, most: int) -> Tensor:
    """Return (B or 1, `most`), true for slots that exist and hold a token."""
    slots = part.x.shape[2]
    filled = part.x.new_ones(1, slots, dtype=torch.bool) if part.filled is None else part.filled
    return pad(filled, (0, most - slots))


class Linformer(EncoderAttention):
    """Softmax over k slots, each a mixture of all positions, so that no mask could make it causal."""

    def __init__(self, longest: int, projections: Projections):
        super().__init__()
        self.longest, self.projections = longest, projections

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        if k.shape[2] > self.longest:
            raise UsageError(
                f"{k.shape[2]:,} tokens: Linformer's projections E and F are as long as the longest input they were "
                f"made for, {self.longest:,} tokens. Cut the input, or build it with a larger `longest`."
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
    longest: Sequence[int], heads: int, width: int, options: recipe.Linformer
) -> list[EncoderAttention]:
    """Return the Linformers of all layers, whose heads have `width` and whose inputs have at most `longest` tokens."""
    if misfit := options.misfit(longest, heads):
        raise UsageError(": ".join(misfit))
    shapes = list(zip(options.slots(len(longest), heads), longest, strict=True))
    made = [_projections(*shapes[0], width, options)] * len(shapes)
    if options.sharing != "layerwise":
        made[1:] = [_projections(*shape, width, options) for shape in shapes[1:]]
    return [Linformer(most, projections) for most, projections in zip(longest, made, strict=True)]


def _projections(slots: list[int], longest: int, width: int, options: recipe.Linformer) -> Projections:
    """Return the projections of one layer, with the number of slots of each head."""

    def make() -> list[Projection]:
        own = slots if options.sharing == "none" else slots[:1]
        return [PROJECTIONS[options.projection](count, longest, width) for count in own]

    key = make()
    return Projections(key, key if options.sharing in ("key-value", "layerwise") else make())
