"""The attentions that are measured, and how they are called: random inputs, outputs, gradients, the definition.

B batch, H heads, T time, K key dim, V value dim.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import logsigmoid, scaled_dot_product_attention

from lmlong.attention.base import CausalAttention, at_least_float32
from lmlong.attention.linear.autograd import Scan, ScanInputs
from lmlong.bench.attention_speed import AttentionShape, build_attention

Attend = Callable[[ScanInputs], Tensor]
"""From queries, keys, values and gates to outputs (B, H, T, V)."""


def build(name: str, heads: int, head_dim: int, device: torch.device, kernel: Scan) -> CausalAttention:
    """Return an attention, whose random features are the same each time."""
    torch.manual_seed(0)
    attention = build_attention(name, AttentionShape(rows=1, heads=heads, width=head_dim, forward_only=False))
    attention.kernel = kernel
    return attention.to(device)


def draw(size: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device, seed: int = 0) -> ScanInputs:
    """Draw queries, keys and values (B, H, T, K) in the layout that a model gives them, and gates from about 0.001 to
    0.9999, as a trained model has them."""
    rows, heads, time, head_dim = size
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(rows, time, heads, *shape, generator=generator, device=device).transpose(1, 2)

    q, k, v = (normal(head_dim).to(dtype).requires_grad_() for _ in range(3))
    log_decay = logsigmoid(3 * normal() + 3).to(at_least_float32(dtype)).requires_grad_()
    return ScanInputs(q, k, v, None, log_decay)


def supplied(attention: CausalAttention, x: ScanInputs) -> ScanInputs:
    """Return the inputs without gates where an attention has none."""
    return x if attention.gated else x._replace(log_decay=None)


def forward(attention: CausalAttention, x: ScanInputs) -> Tensor:
    state = attention.init_state(len(x.q), x.q.device, x.q.dtype)
    return attention(x.q, x.k, x.v, state, x.document_starts, x.log_decay)[0]


def definition(attention: CausalAttention, x: ScanInputs) -> Tensor:
    return attention.reference(x.q, x.k, x.v, x.document_starts, x.log_decay)


def flash(x: ScanInputs) -> Tensor:
    """Softmax by flash attention; on a CPU by what torch has there."""
    if x.q.device.type == "cpu":
        return scaled_dot_product_attention(x.q, x.k, x.v, is_causal=True)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return scaled_dot_product_attention(x.q, x.k, x.v, is_causal=True)


def fla(attention: CausalAttention, x: ScanInputs) -> Tensor:
    """Linear attention by flash-linear-attention, of the same features; it divides by no denominator where there are
    gates. Its layout is (B, T, H, ...)."""
    from fla.ops.linear_attn import chunk_linear_attn
    from fla.ops.simple_gla import chunk_simple_gla

    fq, fk, v = (t.transpose(1, 2) for t in (attention.feature_map.query(x.q), attention.feature_map.key(x.k), x.v))
    if x.log_decay is None:
        y = chunk_linear_attn(fq, fk, v, scale=1.0, normalize=True)[0]
    else:
        y = chunk_simple_gla(fq, fk, v, g=x.log_decay.transpose(1, 2), scale=1.0)[0]
    return y.transpose(1, 2)


def in_float64(x: ScanInputs) -> ScanInputs:
    """Return the same numbers in float64, so that nothing but the computation differs."""
    return ScanInputs(*(t.detach().double().requires_grad_() if has_grad(t) else t for t in x))


def has_grad(t: Tensor | None) -> bool:
    return t is not None and t.is_floating_point()


def output_and_grads(attend: Attend, x: ScanInputs) -> dict[str, Tensor]:
    """Return y and the gradients of all inputs, by name, for a random gradient of y."""
    y = attend(x)
    leaves = {f"d{name}": t for name, t in x._asdict().items() if has_grad(t)}
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(0)).bfloat16().to(y)  # the same in every format
    return {"y": y.detach(), **dict(zip(leaves, torch.autograd.grad(y, list(leaves.values()), dy), strict=True))}
