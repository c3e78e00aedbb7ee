"""The speed of an attention alone: forward and backward pass over queries, keys and values.

B batch, H heads, T time.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from lmlong import recipe
from lmlong.attention.base import CausalAttention
from lmlong.attention.inputs import draw_inputs
from lmlong.attention.registry import CAUSAL
from lmlong.bench.speed import Candidate
from lmlong.recipe.candidates import single_kinds

FORMATS = {"32": torch.float32, "bf16": torch.bfloat16, "64": torch.float64}


class AttentionShape(NamedTuple):
    rows: int
    heads: int
    width: int  # of a head
    forward_only: bool


def attention_candidate(
    name: str, precision: str, length: int, shape: AttentionShape, device: torch.device
) -> Candidate:
    """Return an attention on random inputs of one length; `softmax` is torch's own."""
    torch.manual_seed(0)
    size = (shape.rows, shape.heads, length, shape.width)
    q, k, v, grad = (torch.randn(size, dtype=FORMATS[precision], device=device) for _ in range(4))
    attention = build_attention(name, shape).to(device)
    drawn = draw_inputs(attention.inputs, shape.rows, length, torch.Generator().manual_seed(0))
    others = {name: x.to(device) for name, x in drawn.items()}
    inputs = [q, k, v, *(x for x in others.values() if x.is_floating_point())]
    if not shape.forward_only:
        inputs = [x.requires_grad_() for x in inputs]

    growth = 2 if attention.state_growth == "per token" else 1

    def attend() -> Tensor:
        if name == "softmax":
            return scaled_dot_product_attention(q, k, v, is_causal=True)
        return attention(q, k, v, attention.init_state(shape.rows, device, q.dtype), None, others)[0]

    def work() -> object:
        if shape.forward_only:
            with torch.no_grad():
                return attend()
        return torch.autograd.grad(attend(), inputs, grad)

    input_bytes, output_bytes = sum(x.nbytes for x in inputs), v.nbytes
    if shape.forward_only:
        return Candidate(work, shape.rows * length, input_bytes, input_bytes + output_bytes, growth)
    return Candidate(work, shape.rows * length, input_bytes + grad.nbytes, 2 * (input_bytes + output_bytes), growth)


def build_attention(name: str, shape: AttentionShape) -> CausalAttention:
    options = recipe.Attention(**single_kinds()[name])  # type: ignore[arg-type]
    kind = options.kind
    assert isinstance(kind, str)
    return CAUSAL[kind](shape.heads, shape.width, shape.width, options)
