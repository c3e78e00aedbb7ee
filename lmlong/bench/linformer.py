"""How much faster Linformer is than full attention, and how much less memory it takes: table 3 of its paper.

B batch, H heads, T time, k slots.
"""

import math
import statistics
from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu
from tqdm import tqdm

from lmlong import recipe
from lmlong.attention import ENCODER
from lmlong.attention.encoders import EncoderAttention, FullAttention
from lmlong.bench.cost import held, once, taken
from lmlong.bench.linformer_grid import Grid
from lmlong.model.block import Norm
from lmlong.model.products import Product

Part = Literal["attention", "layer"]
Call = Callable[[EncoderAttention], Tensor]

FULL = "full"

SHORT = 1024
"""Tokens that take no time worth forecasting."""


class MatrixAttention(FullAttention):
    """Full attention with all its T x T weights in memory, as the paper compared with; torch needs them no more."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None) -> Tensor:
        return self.definition(q, k, v)


class Layer(nn.Module):
    """x + attention(x), then x + mlp(x), each of its norm: a layer of an encoder, its attention left open."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm, self.mlp_norm = Norm(width), Norm(width)
        self.project_in, self.project_out = Product(width, 3 * width), Product(width, width)
        self.widen, self.narrow = Product(width, 4 * width), Product(4 * width, width)

    def forward(self, x: Tensor, attention: EncoderAttention) -> Tensor:
        """(B, T, width) -> (B, T, width)."""
        qkv = self.project_in(self.norm(x)).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in qkv)
        x = x + self.project_out(attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.narrow(gelu(self.widen(self.mlp_norm(x))))


class Cost(NamedTuple):
    """What one attention took."""

    seconds: list[float]  # of one pass, by round
    row_bytes: int  # of the inputs of a row, and of all that is held beside them and the weights at one time

    @property
    def quartiles(self) -> list[float]:
        return statistics.quantiles(self.seconds, n=4, method="inclusive")

    @property
    def median(self) -> float:
        return self.quartiles[1]


class Measured(NamedTuple):
    """All attentions on inputs of one length."""

    part: Part  # what was timed: the attention alone, or its whole layer
    length: int
    costs: dict[str, Cost]  # by `full`, where it was not left out, and the slots of each Linformer
    matrix_row_bytes: int  # of full attention with all its weights in memory

    def times_as_fast(self, name: str) -> float:
        """As full attention: the median over the rounds of how much longer that took; nan where it was left out."""
        if FULL not in self.costs:
            return math.nan
        pairs = zip(self.costs[FULL].seconds, self.costs[name].seconds, strict=True)
        return statistics.median(full / other for full, other in pairs)

    def rows(self, name: str) -> float:
        """How many fit where one row fits of full attention with all its weights in memory."""
        return self.matrix_row_bytes / self.costs[name].row_bytes if name in self.costs else math.nan


@torch.no_grad()
def measure(grid: Grid, device: torch.device) -> list[Measured]:
    """Every attention at every length, alone and in its layer; full attention as far as the limit of time allows."""
    found = []
    with tqdm(total=len(PARTS) * len(grid.lengths), leave=False, disable=None) as bar:
        for part in PARTS:
            too_long = False
            for length in grid.lengths:
                bar.set_description(f"{part} at {length:,}")
                too_long = too_long or _too_long(grid, part, length, device)
                found.append(_measure_shape(grid, part, length, too_long, device))
                bar.update()
    return found


def _measure_shape(grid: Grid, part: Part, length: int, too_long: bool, device: torch.device) -> Measured:
    names = [name for name in contestants(grid, length) if name != FULL or not too_long]
    call, inputs = PARTS[part](grid, length, device)
    passes = {name: partial(call, build(grid, length, name).to(device)) for name in names}
    beside = {name: held(each, device) for name, each in passes.items()}
    costs = {
        name: Cost(seconds, (inputs + beside[name]) // grid.rows) for name, seconds in taken(passes, device).items()
    }
    shapes_only = torch.device("meta")  # the matrix need not fit into memory to be counted
    call, inputs = PARTS[part](grid, length, shapes_only)
    matrix = inputs + held(partial(call, MatrixAttention()), shapes_only)
    return Measured(part, length, costs, matrix // grid.rows)


def contestants(grid: Grid, length: int) -> list[str]:
    """Full attention, and a Linformer for each number of slots that is no more than the tokens."""
    return [FULL, *(str(slots) for slots in grid.slots if slots <= length)]


def build(grid: Grid, length: int, name: str) -> EncoderAttention:
    """A contestant for inputs of one length."""
    kind, slots = (FULL, length) if name == FULL else ("linformer", int(name))
    options = recipe.Attention(linformer=recipe.Linformer(projected=slots))
    (attention,) = ENCODER[kind]([length], grid.heads, grid.width // grid.heads, options)
    return attention


def _too_long(grid: Grid, part: Part, length: int, device: torch.device) -> bool:
    """Whether a pass of full attention would take longer than the limit: four times that of half as many tokens."""
    half = length // 2
    if half < SHORT:
        return False
    if _too_long(grid, part, half, device):
        return True
    call, _ = PARTS[part](grid, half, device)
    return 4 * once(partial(call, FullAttention()), device) > grid.limit


def _alone(grid: Grid, length: int, device: torch.device) -> tuple[Call, int]:
    """An attention on queries, keys and values as a layer hands them over, and the bytes of these."""
    heads = (grid.heads, grid.width // grid.heads)
    q, k, v = (_drawn(grid, length, device).unflatten(-1, heads).transpose(1, 2) for _ in range(3))
    return lambda attention: attention(q, k, v), 3 * q.nbytes


def _in_layer(grid: Grid, length: int, device: torch.device) -> tuple[Call, int]:
    layer, x = Layer(grid.width, grid.heads).to(device), _drawn(grid, length, device)
    return lambda attention: layer(x, attention), x.nbytes


PARTS: dict[Part, Callable[[Grid, int, torch.device], tuple[Call, int]]] = {"attention": _alone, "layer": _in_layer}


def _drawn(grid: Grid, length: int, device: torch.device) -> Tensor:
    return torch.randn(grid.rows, length, grid.width, device=device)
