"""The attentions that are measured, and how they are called: random inputs, outputs, gradients, the definition.

B batch, H heads, T time, K key dim, V value dim.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from lmlong.attention import laws
from lmlong.attention.base import CausalAttention
from lmlong.attention.inputs import NOTHING, Inputs, draw_inputs
from lmlong.bench.candidates import AttentionShape, build_attention


class Text(NamedTuple):
    """What an attention reads; every floating-point tensor has a gradient."""

    q: Tensor
    k: Tensor
    v: Tensor
    document_starts: Tensor | None = None
    inputs: Inputs = NOTHING  # what the attention declares, by name

    def map(self, change: Callable[[Tensor], Tensor]) -> "Text":
        """Return the text with each floating-point tensor changed, as a leaf of autograd."""

        def leaf(t: Tensor) -> Tensor:
            return change(t.detach()).requires_grad_() if t.is_floating_point() else t

        inputs = {name: leaf(t) for name, t in self.inputs.items()}
        return self._replace(q=leaf(self.q), k=leaf(self.k), v=leaf(self.v), inputs=inputs)

    @property
    def leaves(self) -> dict[str, Tensor]:
        """The tensors that have a gradient, by the name of it."""
        named = {"q": self.q, "k": self.k, "v": self.v, **self.inputs}
        return {f"d{name}": t for name, t in named.items() if t.is_floating_point()}

    @property
    def flat(self) -> laws.Text:
        """The text as the laws take it."""
        return (*self[:4], *self.inputs.values())


Attend = Callable[[Text], Tensor]
"""From a text to outputs (B, H, T, V)."""


def build(name: str, heads: int, head_dim: int, device: torch.device, kernel: str) -> CausalAttention:
    """Return an attention, whose random features are the same each time."""
    torch.manual_seed(0)
    attention = build_attention(name, AttentionShape(rows=1, heads=heads, width=head_dim, forward_only=False))
    attention.use_kernel(kernel)
    return attention.to(device)


def draw(size: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device, seed: int = 0) -> Text:
    """Draw queries, keys and values (B, H, T, K), in the layout that a model gives them."""
    rows, heads, time, head_dim = size
    generator = torch.Generator(device).manual_seed(seed)
    shape = (rows, time, heads, head_dim)
    q, k, v = (torch.randn(shape, generator=generator, device=device).to(dtype).transpose(1, 2) for _ in range(3))
    return Text(q, k, v).map(lambda t: t)


def supplied(attention: CausalAttention, x: Text, seed: int = 0) -> Text:
    """Return the text with random inputs of what the attention declares."""
    rows, _, time, _ = x.q.shape
    drawn = draw_inputs(attention.inputs, rows, time, torch.Generator().manual_seed(seed))
    return x._replace(inputs={name: t.to(x.q.device) for name, t in drawn.items()}).map(lambda t: t)


def forward(attention: CausalAttention, x: Text) -> Tensor:
    state = attention.init_state(len(x.q), x.q.device, x.q.dtype)
    return attention(x.q, x.k, x.v, state, x.document_starts, x.inputs)[0]


def definition(attention: CausalAttention, x: Text) -> Tensor:
    return attention.reference(x.q, x.k, x.v, x.document_starts, x.inputs)


def flash(x: Text) -> Tensor:
    """Softmax by flash attention; on a CPU by what torch has there."""
    if x.q.device.type == "cpu":
        return scaled_dot_product_attention(x.q, x.k, x.v, is_causal=True)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return scaled_dot_product_attention(x.q, x.k, x.v, is_causal=True)


def fla(attention: CausalAttention, x: Text) -> Tensor:
    """Linear attention by flash-linear-attention, of the same features; it divides by no denominator where there are
    gates. Its layout is (B, T, H, ...)."""
    from fla.ops.linear_attn import chunk_linear_attn
    from fla.ops.simple_gla import chunk_simple_gla

    fq, fk, v = (t.transpose(1, 2) for t in (attention.feature_map.query(x.q), attention.feature_map.key(x.k), x.v))
    if "log_decay" not in x.inputs:
        y = chunk_linear_attn(fq, fk, v, scale=1.0, normalize=True)[0]
    else:
        y = chunk_simple_gla(fq, fk, v, g=x.inputs["log_decay"].transpose(1, 2), scale=1.0)[0]
    return y.transpose(1, 2)


def output_and_grads(attend: Attend, x: Text) -> dict[str, Tensor]:
    """Return y and the gradients of the text, by name, for a random gradient of y."""
    y, leaves = attend(x), x.leaves
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(0)).bfloat16().to(y)  # the same in every format
    return {"y": y.detach(), **dict(zip(leaves, torch.autograd.grad(y, list(leaves.values()), dy), strict=True))}
