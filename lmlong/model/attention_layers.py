"""The attentions of a model's layers: what they are, and with which kernels they compute."""

from collections.abc import Mapping, Sequence

import torch

from lmlong.attention.base import CausalAttention
from lmlong.attention.recurrence import Recurrence
from lmlong.model.block import Block, Mixer


class AttentionLayers:
    """The part of a language model that looks at the attentions of its blocks."""

    blocks: Sequence[Block]
    kinds: Sequence[str]
    """The kind of each mixer's attention in the recipe."""
    kernel_is_set = False
    """Whether `use_kernel` has set the kernel, which `kernel: auto` then leaves alone."""

    @property
    def mixers(self) -> list[Mixer]:
        """The mixers of all layers, in the order in which a token passes them."""
        return [mixer for block in self.blocks for mixer in block.mixers]

    @property
    def attentions(self) -> list[CausalAttention]:
        """The attention of each mixer."""
        return [mixer.attention for mixer in self.mixers]

    @property
    def attention_parts(self) -> list[CausalAttention]:
        """The attentions that the attentions of all mixers consist of."""
        return [part for attention in self.attentions for part in attention.parts]

    @property
    def constant_state(self) -> bool:
        """Whether the state of every mixer has a constant size."""
        return all(attention.state_growth == "constant" for attention in self.attentions)

    def set_state_dtype(self, dtype: torch.dtype) -> None:
        """Set the lowest precision of the states of recurrences."""
        for attention in self.attention_parts:
            if isinstance(attention, Recurrence):
                attention.state_dtype = dtype

    def set_cache_dtype(self, dtype: torch.dtype | None) -> None:
        """Set the dtype in which new states cache keys and values; None for that in which they are computed."""
        for attention in self.attention_parts:
            attention.cache_dtype = dtype

    def use_kernel(self, name: str) -> None:
        """Set the kernel with which attentions compute many tokens: `torch`, `native`, `triton` or `fla`. Torch
        computes whatever the kernel cannot, and attentions without a kernel of that name."""
        self.kernel_is_set = True
        self.use_kernels(dict.fromkeys(self.kinds, name))

    def use_kernels(self, names: Mapping[str, str]) -> None:
        """Set the kernels with which attentions compute many tokens, by their kinds in the recipe."""
        for kind, attentions in self.with_kernels.items():
            for attention in attentions:
                attention.use_kernel(names[kind])

    @property
    def kernel_names(self) -> dict[str, str]:
        """The names of the kernels, by the kinds of the attentions."""
        return {kind: attentions[0].kernel_name for kind, attentions in self.with_kernels.items()}

    @property
    def with_kernels(self) -> dict[str, list[CausalAttention]]:
        """The attentions that have kernels, by their kinds."""
        attentions: dict[str, list[CausalAttention]] = {}
        for kind, attention in zip(self.kinds, self.attentions, strict=True):
            for part in attention.parts:
                if part.kernels:
                    attentions.setdefault(kind, []).append(part)
        return attentions
