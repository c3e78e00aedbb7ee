"""Time and memory of Linformer against full attention: table 3 of its paper.

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

from lmlong import recipe
from lmlong.attention.encoder.base import EncoderAttention
from lmlong.attention.encoder.kinds import FullAttention
from lmlong.attention.registry import ENCODER
from lmlong.bench.linformer_grid import LinformerGrid
from lmlong.bench.timer import peak_bytes, quartiles, time_once, time_rounds
from lmlong.model.layers import RMSNorm
from lmlong.report.progress import Progress

LayerPart = Literal["attention", "layer"]
Call = Callable[[EncoderAttention], Tensor]

FULL = "full"

SHORT = 1024
"""Number of tokens below which no time is forecast."""


class MatrixAttention(FullAttention):
    """Full attention with all T x T weights in memory, as in the paper's comparison; torch no longer needs them."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        return self.definition(q, k, v)


class EncoderLayer(nn.Module):
    """A layer of an encoder, x + attention(norm(x)), then x + mlp(norm(x)), that takes the attention as an argument."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm, self.mlp_norm = (RMSNorm(width, epsilon=1e-6) for _ in range(2))
        self.in_proj, self.out_proj = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.widen, self.narrow = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor, attention: EncoderAttention) -> Tensor:
        """(B, T, width) -> (B, T, width)."""
        qkv = self.in_proj(self.norm(x)).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in qkv)
        x = x + self.out_proj(attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.narrow(gelu(self.widen(self.mlp_norm(x))))


class LinformerCost(NamedTuple):
    """The time and memory of one attention."""

    seconds: list[float]  # of one pass, by round
    row_bytes: int  # of the inputs of a row, and the most that is held beside them and the weights

    @property
    def quartiles(self) -> list[float]:
        return quartiles(self.seconds)

    @property
    def median(self) -> float:
        return self.quartiles[1]


class LinformerResult(NamedTuple):
    """All attentions on inputs of one length."""

    part: LayerPart  # the attention alone, or its whole layer
    length: int
    costs: dict[str, LinformerCost]  # by `full`, unless it was left out, and the slots of each Linformer
    matrix_row_bytes: int  # of full attention with all its weights in memory

    def times_as_fast(self, name: str) -> float:
        """Return the speed relative to full attention, the median over the rounds; nan if that was left out."""
        if FULL not in self.costs:
            return math.nan
        pairs = zip(self.costs[FULL].seconds, self.costs[name].seconds, strict=True)
        return statistics.median(full / linformer for full, linformer in pairs)

    def rows(self, name: str) -> float:
        """Return how many rows fit into the memory of one row of full attention with all its weights."""
        return self.matrix_row_bytes / self.costs[name].row_bytes if name in self.costs else math.nan


@torch.no_grad()
def run_linformer_benchmark(grid: LinformerGrid, device: torch.device) -> list[LinformerResult]:
    """Measure every attention at every length, alone and in its layer; full attention within the limit of time."""
    results = []
    with Progress("linformer", len(PARTS) * len(grid.lengths), "shapes") as progress:
        for part in PARTS:
            too_long = False
            for length in grid.lengths:
                progress.begin(f"{part} at {length:,}")
                too_long = too_long or _too_long(grid, part, length, device)
                results.append(_measure_shape(grid, part, length, too_long, device))
                progress.update()
    return results


def _measure_shape(
    grid: LinformerGrid, part: LayerPart, length: int, too_long: bool, device: torch.device
) -> LinformerResult:
    names = [name for name in candidate_names(grid, length) if name != FULL or not too_long]
    call, inputs = PARTS[part](grid, length, device)
    passes = {name: partial(call, build_candidate(grid, length, name).to(device)) for name in names}
    beside = {name: peak_bytes(each, device) for name, each in passes.items()}
    costs = {
        name: LinformerCost(seconds, (inputs + beside[name]) // grid.rows)
        for name, seconds in time_rounds(passes, device).items()
    }
    shapes_only = torch.device("meta")  # so that the matrix need not fit into memory
    call, inputs = PARTS[part](grid, length, shapes_only)
    matrix = inputs + peak_bytes(partial(call, MatrixAttention()), shapes_only)
    return LinformerResult(part, length, costs, matrix // grid.rows)


def candidate_names(grid: LinformerGrid, length: int) -> list[str]:
    """Return full attention, and a Linformer for each number of slots up to the number of tokens."""
    return [FULL, *(str(slots) for slots in grid.slots if slots <= length)]


def build_candidate(grid: LinformerGrid, length: int, name: str) -> EncoderAttention:
    """Return a candidate for inputs of one length."""
    kind, slots = (FULL, length) if name == FULL else ("linformer", int(name))
    options = recipe.Attention(linformer=recipe.Linformer(projected=slots))
    (attention,) = ENCODER[kind]([length], grid.heads, grid.width // grid.heads, options)
    return attention


def _too_long(grid: LinformerGrid, part: LayerPart, length: int, device: torch.device) -> bool:
    """Return whether a pass of full attention would exceed the limit: four times that of half the tokens."""
    half = length // 2
    if half < SHORT:
        return False
    if _too_long(grid, part, half, device):
        return True
    call, _ = PARTS[part](grid, half, device)
    return 4 * time_once(partial(call, FullAttention()), device) > grid.limit


def _alone(grid: LinformerGrid, length: int, device: torch.device) -> tuple[Call, int]:
    """Return a call of an attention on queries, keys and values in the layout of a layer, and their bytes."""
    heads = (grid.heads, grid.width // grid.heads)
    q, k, v = (_drawn(grid, length, device).unflatten(-1, heads).transpose(1, 2) for _ in range(3))
    return lambda attention: attention(q, k, v), 3 * q.nbytes


def _in_layer(grid: LinformerGrid, length: int, device: torch.device) -> tuple[Call, int]:
    layer, x = EncoderLayer(grid.width, grid.heads).to(device), _drawn(grid, length, device)
    return lambda attention: layer(x, attention), x.nbytes


PARTS: dict[LayerPart, Callable[[LinformerGrid, int, torch.device], tuple[Call, int]]] = {
    "attention": _alone,
    "layer": _in_layer,
}


def _drawn(grid: LinformerGrid, length: int, device: torch.device) -> Tensor:
    return torch.randn(grid.rows, length, grid.width, device=device)
