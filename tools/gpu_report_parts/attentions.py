"""Attention alone: its numbers beside the definition, its laws, and its speed beside flash attention.

B batch, H heads, T time, K key dim, V value dim.
"""

import copy
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from gpu_report_parts.measure import LeftOutError, Sizes, Work
from lmlong.attention import laws as attention_laws
from lmlong.attention.base import CausalAttention
from lmlong.attention.inputs import draw_inputs
from lmlong.attention.laws import Text
from lmlong.bench.candidates import build_attention
from lmlong.bench.timer import peak_bytes, quartiles, time_rounds
from lmlong.recipe.lengths import name_length

ATTENTIONS = ("elu-learned", "delta", "elu-channel", "elu", "favor-learned")
"""By their names in `lmlong bench`; the first is that of the recipes."""

DTYPES = {"bf16": torch.bfloat16, "32": torch.float32}

ALLOWED = {"bf16": 2e-2, "32": 2e-5}
"""Errors relative to the norm that are rounding; four times those of torch's operations are too."""

HEADS, ROWS = 2, 2


def kernels(name: str, device: torch.device, head_dim: int = 64) -> Iterator[str]:
    """Iterate over the kernels that can compute an attention on a device, torch last."""
    attention = build(name, HEADS, head_dim, "torch", device)
    for kernel in [*(name for name in attention.kernels if name not in ("native", "torch")), "torch"]:
        if attention.kernels[kernel].unavailable_reason(attention, device) is None:
            yield kernel


def laws(sizes: Sizes, device: torch.device) -> Iterator[Work]:
    """Compare every attention by every kernel with its definition, then check its laws."""
    named = [(name, kernel) for name in ATTENTIONS for kernel in kernels(name, device)]
    for head_dim in sizes.head_dims:
        for precision in DTYPES:
            for name, kernel in named:
                row = f"{name} by {kernel}, {precision}, heads of {head_dim}"
                check = partial(Case, name, kernel, precision, head_dim, sizes, device)
                yield Work(row, "definition", lambda check=check: check().errors())  # type: ignore[misc]
                yield Work(row, "laws", lambda check=check: check().laws())  # type: ignore[misc]


class Case:
    """An attention by a kernel in a number format, and texts for it."""

    def __init__(self, name: str, kernel: str, precision: str, head_dim: int, sizes: Sizes, device: torch.device):
        self.attention = build(name, HEADS, head_dim, kernel, device)
        self.usual = build(name, HEADS, head_dim, "torch", device)
        self.allowed, self.time = ALLOWED[precision], sizes.checked
        self.text, self.other = (
            draw(self.attention, (ROWS, HEADS, self.time, head_dim), DTYPES[precision], device, seed) for seed in (0, 1)
        )
        self.begins = sorted({0, 64, self.time // 2, self.time // 2 + 1})
        self.starts = torch.zeros(ROWS, self.time, dtype=torch.bool, device=device)
        self.starts[:, self.begins] = True
        self.packed = (*self.text[:3], self.starts, *self.text[4:])

    def errors(self) -> dict[str, float]:
        """Return the errors of the output and of the gradients; those of torch's operations are what is possible."""
        exact = copy.deepcopy(self.attention).double()
        truth = results(partial(attention_laws.reference, exact), as_leaves(self.packed, torch.float64))
        mine, usual = (results(partial(attend, by), as_leaves(self.packed)) for by in (self.attention, self.usual))
        cells = {name: attention_laws.error(mine[name], truth[name]) for name in truth}
        for name, error in cells.items():
            possible = attention_laws.error(usual[name], truth[name])
            if not error <= max(self.allowed, 4 * possible):
                raise ArithmeticError(f"the error of {name} is {error:.1e}, by torch's operations {possible:.1e}")
        return cells

    @torch.no_grad()
    def laws(self) -> dict[str, float]:
        """Return the errors of the laws that compare ways to compute the same text."""
        subject = attention_laws.of_attention(self.attention, self.text[0])  # type: ignore[arg-type]
        cuts = [1, 64, 65, self.time - 1]
        case = attention_laws.Case(subject, self.text, self.other, self.packed, self.begins, cuts, starts=3)
        cells = {f"law {number}": attention_laws.measure(number, case) for number in attention_laws.SAME_TEXT}
        for number in attention_laws.SAME_TEXT:
            allowed = 0.0 if number in attention_laws.EXACT else self.allowed
            if not (error := cells[f"law {number}"]) <= allowed:
                raise ArithmeticError(f"{attention_laws.LAWS[number]}: the error is {error:.1e}")
        return cells


def attention(sizes: Sizes, device: torch.device) -> Iterator[Work]:
    """Measure attentions at growing lengths, the recipes' own first."""
    named = [(name, kernel) for name in ATTENTIONS for kernel in kernels(name, device)]
    head_dim = sizes.head_dims[0]
    for length in sizes.lengths:
        size = (max(1, sizes.tokens // length), sizes.width // head_dim, length, head_dim)
        candidates = [("softmax", FLASH), *named, (ATTENTIONS[0], FLA)]
        for name, kernel in sorted(candidates, key=lambda one: one[1] in ("fla", FLA)):  # they try many configurations
            row = f"{name} by {kernel}"
            yield Work(row, name_length(length), partial(speed, name, kernel, size, sizes.seconds, device))


def speed(
    name: str, kernel: str, size: tuple[int, int, int, int], seconds: float, device: torch.device
) -> dict[str, float]:
    """Return the tokens per second of a forward and backward pass whose numbers are those of torch's operations."""
    rows, heads, length, head_dim = size
    usual = build(name, heads, head_dim, "torch", device)
    text = as_leaves(draw(usual, size, torch.bfloat16, device))
    call = partial(OTHER_LIBRARIES.get(kernel, attend), build(name, heads, head_dim, kernel, device))
    leaves = [x for x in text if x is not None and x.requires_grad]
    dy = torch.randn(size, device=device).bfloat16()

    def work() -> tuple[Tensor, ...]:
        return torch.autograd.grad(call(text), leaves, dy)

    peak = peak_bytes(work, device)
    if kernel not in ("torch", *OTHER_LIBRARIES):
        compare(work(), torch.autograd.grad(attend(usual, text), leaves, dy))
    timed = time_rounds({"": work}, device, seconds)[""]
    short = name_length(length)
    return {short: quartiles([rows * length / each for each in timed])[1], f"GB, {short}": peak / 1e9}


def flash(attention: CausalAttention, text: Text) -> Tensor:
    """Softmax by flash attention; on a CPU by what torch has there."""
    q, k, v = text[:3]
    assert q is not None and k is not None and v is not None
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION if q.is_cuda else SDPBackend.MATH):
        return scaled_dot_product_attention(q, k, v, is_causal=True)


def fla(attention: CausalAttention, text: Text) -> Tensor:
    """Linear attention by flash-linear-attention, whose layout is (B, T, H, ...). It divides by no denominator."""
    if not find_spec("fla") or text[0].device.type == "cpu":  # type: ignore[union-attr]
        raise LeftOutError("it is not installed, or there is no GPU")
    from fla.ops.simple_gla import chunk_simple_gla

    q, k, v, _, inputs = attention_laws.arguments(attention, text)
    features: Any = attention.feature_map
    fq, fk, v, log_decay = (x.transpose(1, 2) for x in (features.query(q), features.key(k), v, inputs["log_decay"]))
    return chunk_simple_gla(fq, fk, v, g=log_decay, scale=1.0)[0].transpose(1, 2)


FLASH, FLA = "torch's flash attention", "fla, no denominator"

OTHER_LIBRARIES: dict[str, Callable[[CausalAttention, Text], Tensor]] = {FLASH: flash, FLA: fla}


def compare(mine: tuple[Tensor, ...], usual: tuple[Tensor, ...]) -> None:
    """Refuse gradients of queries, keys and values that are not those of torch's operations. Those of gates are sums of
    terms that mostly cancel, of which rounding leaves less the longer the text is."""
    for name, a, b in zip(("dq", "dk", "dv"), mine, usual, strict=False):
        if not (error := attention_laws.error(a, b)) <= 3e-2:
            raise ArithmeticError(f"{name} is {error:.1e} from that by torch's operations")


def build(name: str, heads: int, head_dim: int, kernel: str, device: torch.device) -> CausalAttention:
    """Return an attention, whose random features are the same each time."""
    torch.manual_seed(0)
    attention = build_attention(name, heads, head_dim)
    attention.use_kernel(kernel)
    return attention.to(device)


def draw(
    attention: CausalAttention,
    size: tuple[int, int, int, int],
    dtype: torch.dtype,
    device: torch.device,
    seed: int = 0,
) -> Text:
    """Return random q, k, v (B, H, T, K) in the layout that a model gives them, no document starts, and the inputs."""
    rows, heads, time, head_dim = size
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn(rows, time, heads, head_dim, generator=generator).to(device, dtype).transpose(1, 2)
        for _ in range(3)
    )
    inputs = draw_inputs(attention.inputs, rows, time, generator)
    return (q, k, v, None, *(x.to(device) for x in inputs.values()))


def as_leaves(text: Text, dtype: torch.dtype | None = None) -> Text:
    """Return a text whose floating-point tensors have gradients."""
    return tuple(
        x if x is None or not x.is_floating_point() else x.detach().to(dtype or x.dtype).requires_grad_() for x in text
    )


def attend(attention: CausalAttention, text: Text) -> Tensor:
    q, k, v, document_starts, inputs = attention_laws.arguments(attention, text)
    state = attention.init_state(len(q), q.device, q.dtype)
    return attention(q, k, v, state, document_starts, inputs)[0]


def results(call: Callable[[Text], Tensor], text: Text) -> dict[str, Tensor]:
    """Return the output y and the gradients of the text for the same gradient of y in every format."""
    y, leaves = call(text), [x for x in text if x is not None and x.requires_grad]
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(0)).bfloat16().to(y)
    names = ("dq", "dk", "dv", *("dgate" for _ in leaves[3:]))
    return {"y": y.detach(), **dict(zip(names, torch.autograd.grad(y, leaves, dy), strict=True))}
