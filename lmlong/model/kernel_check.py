"""`kernel: auto`: native code on a CPU; on a GPU its kernel, after a comparison with torch on a short random text.

B batch, H heads, T time, K key dim, V value dim.
"""

import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lmlong.attention.base import CausalAttention
from lmlong.attention.inputs import draw_inputs
from lmlong.attention.laws import error
from lmlong.errors import LmlongError
from lmlong.model.device import DTYPES, autocast
from lmlong.model.language_model import LanguageModel
from lmlong.model.state import rebuild_state
from lmlong.native.state import state_tensors

ROWS, TOKENS, STARTS = 2, 200, (3, 64, 130)
"""The size of the text, several chunks and a part of one, and the document starts in its first row."""

FACTOR = 4
ROUNDING = {"32": 1e-4, "bf16": 2**-6, "16": 2**-9}
"""A kernel agrees with torch if the error of each result, relative to its norm, is at most FACTOR times the error of
torch in the same number format, plus this. Errors are differences from torch in float32."""


class CheckText(NamedTuple):
    """Random inputs of an attention."""

    q: Tensor  # (B, H, T, K)
    k: Tensor  # (B, H, T, K)
    v: Tensor  # (B, H, T, V)
    dy: Tensor  # (B, H, T, V) the gradient of the outputs
    document_starts: Tensor  # (B, T)
    inputs: dict[str, Tensor]
    state: Any

    def in_float32(self) -> "CheckText":
        return self._replace(q=self.q.float(), k=self.k.float(), v=self.v.float(), dy=self.dy.float())


def checked_kernels(
    model: LanguageModel, precision: str, trains: bool, device: torch.device
) -> tuple[dict[str, str], list[str]]:
    """Return the kernel of each kind of attention in a model, and a line for each that is refused. With `trains`,
    gradients are compared too. A kernel set by name is kept."""
    names = {kind: attentions[0].kernel_name for kind, attentions in model.with_kernels.items()}
    lines: list[str] = []
    if model.kernel_is_set:
        return names, lines
    for kind, (attention, *_) in model.with_kernels.items():
        names[kind] = kernel = usable_kernel(attention, device)
        if kernel not in ("native", "torch") and (why := why_refused(attention, kernel, precision, trains, device)):
            names[kind] = "torch"
            lines.append(f"kernel: {kind} is computed by torch, since {kernel} {why}")
    return names, lines


def usable_kernel(attention: CausalAttention, device: torch.device) -> str:
    """Return the first kernel other than torch that can compute an attention on a device; torch if none can."""
    reasons = attention.kernel_reasons(device)
    return next((name for name, why in reasons.items() if why is None and name != "torch"), "torch")


def why_refused(
    attention: CausalAttention, kernel: str, precision: str, trains: bool, device: torch.device
) -> str | None:
    """Return why a kernel must not compute an attention: it differs from torch, or fails. None if it agrees."""
    copied = copy.deepcopy(attention).to(device)
    copied.is_compiled = False
    copied.use_kernel("torch")
    text = draw_text(copied, DTYPES[precision], device)
    exact = compute(copied, text.in_float32(), "32", trains)
    by_torch = compute(copied, text, precision, trains)
    copied.use_kernel(kernel)
    try:
        results = compute(copied, text, precision, trains)
        errors = {name: error(results[name], exact[name]) for name in exact}
    except Exception as failure:  # compilers and drivers raise many types
        _check_device(device, kernel, failure)
        return f"fails: {_in_a_line(failure)}"
    allowed = {name: FACTOR * error(by_torch[name], exact[name]) + ROUNDING[precision] for name in exact}
    worst = max(errors, key=lambda name: errors[name] / allowed[name])
    return None if errors[worst] <= allowed[worst] else f"differs: {worst} is off by {errors[worst]:.0e}"


def draw_text(attention: CausalAttention, dtype: torch.dtype, device: torch.device) -> CheckText:
    """Draw a text, in the memory layout in which a model passes it, from the state after the same text."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(heads: int, width: int) -> Tensor:
        return torch.randn(ROWS, TOKENS, heads, width, generator=generator, device=device, dtype=dtype).transpose(1, 2)

    key_dim = attention.head_dim if attention.has_keys else 0
    drawn = draw_inputs(attention.inputs, ROWS, TOKENS, torch.Generator().manual_seed(0))
    document_starts = torch.zeros(ROWS, TOKENS, dtype=torch.bool, device=device)
    document_starts[0, list(STARTS)] = True
    text = CheckText(
        normal(attention.heads, key_dim),
        normal(attention.kv_heads, key_dim),
        normal(attention.kv_heads, attention.value_dim),
        normal(attention.heads, attention.value_dim),
        document_starts,
        {name: x.to(device) for name, x in drawn.items()},
        attention.init_state(ROWS, device, dtype),
    )
    with torch.no_grad():
        q, k, v, _, *rest = text.in_float32()
        _, state = attention(q, k, v, text.state, *rest[:2])
    return text._replace(state=state)


def compute(attention: CausalAttention, text: CheckText, precision: str, trains: bool) -> dict[str, Tensor]:
    """Return the outputs, the state after and, with `trains`, all gradients, by name."""
    states = {f"S{number or ''}": x for number, x in enumerate(state_tensors(text.state))}
    tensors = {"q": text.q, "k": text.k, "v": text.v, **text.inputs, **states}
    leaves = {name: x.detach() for name, x in tensors.items()}
    trained = {name: x.requires_grad_() for name, x in leaves.items() if trains and x.is_floating_point() and x.numel()}
    if trains:
        trained |= {name: x for name, x in attention.named_parameters() if x.requires_grad}
    state = rebuild_state(text.state, iter(leaves[name] for name in states))
    given = {name: leaves[name] for name in text.inputs}
    with autocast(text.q.device, precision), torch.set_grad_enabled(trains):
        y, after = attention(leaves["q"], leaves["k"], leaves["v"], state, text.document_starts, given)
    results = {"y": y, **dict(zip(states, state_tensors(after), strict=True))}
    if not trains:
        return results
    dy = {"y": text.dy.to(y.dtype), **states}
    outputs = {name: x for name, x in results.items() if x.requires_grad}
    slopes = [dy[name] for name in outputs]
    grads = torch.autograd.grad(list(outputs.values()), list(trained.values()), slopes, materialize_grads=True)
    return results | {f"d{name}": grad for name, grad in zip(trained, grads, strict=True)}


def _check_device(device: torch.device, kernel: str, failure: Exception) -> None:
    """Raise an error unless the device still computes: after an illegal memory access, CUDA refuses everything."""
    try:
        torch.ones(1, device=device).sum().item()
    except RuntimeError:
        what = f"kernel: {kernel} has made the GPU unusable for this process ({_in_a_line(failure)})"
        raise LmlongError(f"{what}. Train with training.kernel: torch, or use --device cpu.") from failure


def _in_a_line(failure: Exception) -> str:
    return f"{type(failure).__name__}: {' '.join(str(failure).split())}"[:120]
