"""The per-token inputs of an attention besides queries, keys and values, declared as data.

From these declarations the model projects gates from the vector of each token and passes the last tokens, without
knowing the attention.

B batch, H heads, T time, D channels of a head.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid, softplus

from lmlong.attention.products import linear

MIN_LOG_DECAY = -20.0
"""Lower bound of log decays: a gate keeps at least exp(-20) of the state, so that sums of log decays stay exact."""

Inputs: TypeAlias = Mapping[str, Tensor]
"""The inputs of an attention, by their declared names."""

NOTHING: Inputs = MappingProxyType({})


class Gate(NamedTuple):
    """A number for each token and head, or each channel of a head, projected from the token's vector.

    Its range follows from the activation: any number for `identity`, 0 to 1 for `sigmoid`, 0 to 2 for
    `double_sigmoid`, and the log of a fraction, from MIN_LOG_DECAY to 0, for `log_sigmoid` and `softplus`.
    """

    name: str  # of its projection among the model's weights
    activation: Literal["identity", "sigmoid", "double_sigmoid", "log_sigmoid", "softplus"]
    start: Tensor  # (H,), or (H, D) with a gate for each channel: the initial bias of the projection
    rank: int | None = None  # of a projection that is the product of two matrices; None: a single matrix
    biased: bool = True

    def activate(self, x: Tensor, log_rate: Tensor | None = None) -> Tensor:
        """Return the gate for the projected values `x`, of the same shape. `log_rate`, of `softplus`, defaults to 0."""
        if self.activation == "identity":
            return x
        if self.activation in ("sigmoid", "double_sigmoid"):
            return x.sigmoid() if self.activation == "sigmoid" else 2 * x.sigmoid()
        if self.activation == "log_sigmoid":
            return logsigmoid(x).clamp(min=MIN_LOG_DECAY)
        return (-softplus(x) * (1 if log_rate is None else log_rate.exp())).clamp(min=MIN_LOG_DECAY)


class LastTokens(NamedTuple):
    """Numbers computed from the last tokens of a document, such as their hash."""

    size: int  # number of tokens, including the current one
    make: Callable[[Tensor], Tensor]
    """(B, T, size) the last tokens at each token, -1 before the start of the document -> (B, H, T, ...)."""


class Rotated(NamedTuple):
    """Queries or keys with rotary positions, for an attention that also reads them without. Without positions in the
    model, they are not rotated."""

    of: Literal["q", "k"]
    heads: int
    head_dim: int


Input: TypeAlias = Gate | LastTokens | Rotated


class GateProjection(nn.Module):
    """The linear projection of a gate."""

    def __init__(self, width: int, gate: Gate):
        super().__init__()
        self.gate = gate
        self.down = None if gate.rank is None else nn.Parameter(torch.randn(gate.rank, width) * width**-0.5)
        self.weight = nn.Parameter(torch.zeros(gate.start.numel(), gate.rank or width))
        start = gate.start.flatten().to(torch.get_default_device(), copy=True)
        self.bias = nn.Parameter(start) if gate.biased else None
        self.log_rate = nn.Parameter(torch.zeros_like(start)) if gate.activation == "softplus" else None

    @property
    def projection(self) -> nn.Parameter:
        """The first matrix that a token's vector is multiplied by."""
        return self.weight if self.down is None else self.down

    def forward(self, x: Tensor) -> Tensor:
        """Return gates (B, H, T) or (B, H, T, D) of x (B, T, width), in at least float32: bfloat16 rounds 0.999 to 1.
        Only what is added to the bias is computed in the dtype of x."""
        for weight in [self.weight] if self.down is None else [self.down, self.weight]:
            x = linear(x, weight.to(x.dtype))
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        if self.bias is not None:
            x = x + self.bias.to(x.dtype)
        gates = self.gate.activate(x, None if self.log_rate is None else self.log_rate.to(x.dtype))
        return gates.mT if self.gate.start.ndim == 1 else gates.unflatten(-1, self.gate.start.shape).transpose(1, 2)


def last_tokens(tokens: Tensor, past: Tensor, in_document: Tensor) -> Tensor:
    """Return the last 1 + P tokens at each of `tokens` (B, T), oldest first, (B, T, 1 + P); -1 for tokens of another
    document. `past` are the P tokens before `tokens`; `in_document` counts the tokens of its document before each."""
    windows = torch.cat([past, tokens], dim=1).unfold(1, past.shape[1] + 1, 1)
    back = torch.arange(past.shape[1], -1, -1, device=tokens.device)
    return windows.masked_fill(in_document[:, :, None] < back, -1)


def draw_inputs(
    inputs: Mapping[str, Input],
    batch: int,
    time: int,
    draw: torch.Generator,
    dtype: torch.dtype = torch.float32,
    document_starts: Tensor | None = None,
) -> dict[str, Tensor]:
    """Return random values of the declared inputs. Gates range from almost closed to almost open, as in a trained
    model."""
    drawn = {}
    for name, declared in inputs.items():
        if isinstance(declared, Gate):
            heads, *channels = declared.start.shape
            raw = 3 * torch.randn(batch, heads, time, *channels, generator=draw, dtype=dtype)
            drawn[name] = declared.activate(raw + declared.start.cpu().to(dtype).unsqueeze(1))
        elif isinstance(declared, Rotated):
            drawn[name] = torch.randn(batch, declared.heads, time, declared.head_dim, generator=draw, dtype=dtype)
        else:
            tokens = torch.randint(3, (batch, time), generator=draw)
            past = torch.zeros(batch, declared.size - 1, dtype=torch.long)
            begun = torch.zeros(batch, time, dtype=torch.long) if document_starts is None else document_starts.long()
            positions = torch.arange(time).expand(batch, -1)
            drawn[name] = declared.make(last_tokens(tokens, past, positions - (positions * begun).cummax(1).values))
    return drawn
