"""A trial of kernels on a device: each is compared with torch in float32 on a short text, then timed on a long one.

B batch, H heads, T time, K key dim, V value dim.
"""

import copy
import statistics
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lmlong.attention.base import CausalAttention
from lmlong.attention.inputs import draw_inputs
from lmlong.attention.laws import error
from lmlong.errors import LmlongError
from lmlong.model.device import synchronize
from lmlong.model.precision import DTYPES, autocast
from lmlong.model.state import rebuild_state
from lmlong.native.state import state_tensors

SHORT = 200
"""Tokens of the text on which kernels are compared: several chunks and a part of one."""

STARTS = (3, 64, 130)
"""Document starts in the first row of that text; the second row has none."""

FACTOR = 4
ROUNDING = {"32": 1e-4, "bf16": 2**-6, "16": 2**-9}
"""A kernel agrees with torch if the error of each result, relative to its norm, is at most FACTOR times the error of
torch in the same number format, plus this. Errors are differences from torch in float32."""

WARM_UP, REPEATS = 2, 5


class Work(NamedTuple):
    """What a model computes at a time."""

    rows: int
    tokens: int
    precision: str  # of lmlong.model.precision
    trains: bool  # forward and backward; only forward if False


class TrialText(NamedTuple):
    """Random inputs of an attention."""

    q: Tensor  # (B, H, T, K)
    k: Tensor  # (B, H, T, K)
    v: Tensor  # (B, H, T, V)
    dy: Tensor  # (B, H, T, V) the gradient of the outputs
    document_starts: Tensor  # (B, T)
    inputs: dict[str, Tensor]
    state: Any

    def in_float32(self) -> "TrialText":
        return self._replace(q=self.q.float(), k=self.k.float(), v=self.v.float(), dy=self.dy.float())


class TrialResult(NamedTuple):
    """The result of one kernel."""

    kernel: str
    seconds: float | None  # None if it is refused
    refusal: str = ""


class BrokenDeviceError(LmlongError):
    """A kernel has left the device in a state in which this process cannot use it."""

    def __init__(self, kernel: str, failure: Exception):
        super().__init__(
            f"kernel: {kernel} has made the GPU unusable for this process ({_first_line(failure)}). Run the command "
            "again: it does not try this kernel again."
        )


def median_seconds(attention: CausalAttention, text: TrialText, work: Work) -> float:
    """Return the median time of an attention in seconds."""
    seconds = []
    for _ in range(WARM_UP + REPEATS):
        synchronize(text.q.device)
        begun = time.perf_counter()
        compute(attention, text, work)
        synchronize(text.q.device)
        seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds[WARM_UP:])


def try_kernels(
    attention: CausalAttention, names: Sequence[str], work: Work, device: torch.device
) -> list[TrialResult]:
    """Return the results of kernels on a copy of an attention, in this order."""
    copied = copy.deepcopy(attention).to(device)
    copied.compiled = False
    copied.use_kernel("torch")
    short = draw_text(copied, work._replace(rows=2, tokens=SHORT), device)
    short.document_starts[0, list(STARTS)] = True
    exact_work = work._replace(precision="32")
    with torch.no_grad():
        q, k, v, _, *rest = short.in_float32()
        _, state = copied(q, k, v, short.state, *rest[:2])
    short = short._replace(state=state)
    exact = compute(copied, short.in_float32(), exact_work)
    by_torch = compute(copied, short, work)
    allowed = {name: FACTOR * error(by_torch[name], exact[name]) + ROUNDING[work.precision] for name in exact}
    long = draw_text(copied, work, device)
    long.document_starts[:, [0, work.tokens // 2]] = True
    trials = []
    for name in names:
        copied.use_kernel(name)
        try:
            refusal = disagreement(compute(copied, short, work), exact, allowed)
            seconds = None if refusal else median_seconds(copied, long, work)
            trials.append(TrialResult(name, seconds, refusal))
        except torch.OutOfMemoryError:
            trials.append(TrialResult(name, None, "needs more memory than there is"))
        except Exception as failure:  # compilers and drivers raise many types
            trials.append(TrialResult(name, None, f"fails: {_first_line(failure)}"))
            _check_device(device, name, failure)
    torch.cuda.empty_cache()  # does nothing on other devices
    return trials


def draw_text(attention: CausalAttention, work: Work, device: torch.device) -> TrialText:
    """Draw a text without document starts, in the memory layout in which a model passes it, from the empty state."""
    dtype, rows, tokens = DTYPES[work.precision], work.rows, work.tokens
    generator = torch.Generator(device).manual_seed(0)

    def normal(heads: int, width: int) -> Tensor:
        return torch.randn(rows, tokens, heads, width, generator=generator, device=device, dtype=dtype).transpose(1, 2)

    key_dim = attention.head_dim if attention.has_keys else 0
    # a long text repeats a short one, which takes less time than drawing it on the CPU
    drawn = draw_inputs(attention.inputs, 1, min(tokens, SHORT), torch.Generator().manual_seed(0))
    repeats = -(-tokens // SHORT)
    return TrialText(
        normal(attention.heads, key_dim),
        normal(attention.kv_heads, key_dim),
        normal(attention.kv_heads, attention.value_dim),
        normal(attention.heads, attention.value_dim),
        torch.zeros(rows, tokens, dtype=torch.bool, device=device),
        {name: _repeated(x.to(device), rows, repeats)[:, :, :tokens] for name, x in drawn.items()},
        attention.init_state(rows, device, dtype),
    )


def compute(attention: CausalAttention, text: TrialText, work: Work) -> dict[str, Tensor]:
    """Return the outputs, the state after and, if the work trains, all gradients, by name."""
    tensors = {"q": text.q, "k": text.k, "v": text.v, **text.inputs}
    states = {f"S{number or ''}": x for number, x in enumerate(state_tensors(text.state))}
    leaves = {name: x.detach() for name, x in (tensors | states).items()}
    trained = {name: x for name, x in leaves.items() if work.trains and x.is_floating_point() and x.numel()}
    for x in trained.values():
        x.requires_grad_()
    if work.trains:
        trained |= {name: x for name, x in attention.named_parameters() if x.requires_grad}
    state = rebuild_state(text.state, iter(leaves[name] for name in states))
    given = {name: leaves[name] for name in text.inputs}
    with autocast(text.q.device, work.precision), torch.set_grad_enabled(work.trains):
        y, after = attention(leaves["q"], leaves["k"], leaves["v"], state, text.document_starts, given)
    results = {"y": y, **dict(zip(states, state_tensors(after), strict=True))}
    if not work.trains:
        return results
    slopes = {"y": text.dy.to(y.dtype), **states}
    outputs = [name for name, x in results.items() if x.requires_grad]
    grads = torch.autograd.grad(
        [results[name] for name in outputs],
        list(trained.values()),
        [slopes[name] for name in outputs],
        materialize_grads=True,
    )
    return {**results, **{f"d{name}": grad for name, grad in zip(trained, grads, strict=True)}}


def disagreement(results: dict[str, Tensor], exact: dict[str, Tensor], allowed: dict[str, float]) -> str:
    """Return the result that is furthest outside its bound, as a text; empty if all agree."""
    errors = {name: error(results[name], exact[name]) for name in exact}
    worst = max(errors, key=lambda name: errors[name] / allowed[name])
    return "" if errors[worst] <= allowed[worst] else f"disagrees: {worst} off by {errors[worst]:.0e}"


def _repeated(x: Tensor, rows: int, repeats: int) -> Tensor:
    """Repeat an input (1, H, T, ...) for all rows, and along the time."""
    return x.repeat(rows, 1, repeats, *[1] * (x.ndim - 3))


def _check_device(device: torch.device, kernel: str, failure: Exception) -> None:
    """Raise BrokenDeviceError unless the device still computes: after an illegal memory access, CUDA refuses all."""
    try:
        torch.ones(1, device=device).sum().item()
    except RuntimeError:
        raise BrokenDeviceError(kernel, failure) from failure


def _first_line(failure: Exception) -> str:
    line = next(iter(str(failure).splitlines()), "")[:100]
    line = "".join(character if character.isprintable() else " " for character in line)
    return f"{type(failure).__name__}: {line}" if line else type(failure).__name__
