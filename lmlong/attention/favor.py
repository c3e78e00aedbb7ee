"""FAVOR+ (Choromanski et al. 2021): random features whose products are, in the mean, softmax's exponential.

    exp(q . k) = E_w [exp(w . q - |q|^2 / 2) exp(w . k - |k|^2 / 2)],  w a normal vector

B batch, H heads, T time, D width, M random rows.
"""

import math
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm

from lmlong.attention.features import FeatureMap

Norms = Literal["chi", "fixed", "quantile"]
Form = Literal["positive", "hyperbolic"]


def draw_rows(rows: int, width: int, norms: Norms, draw: torch.Generator, orthogonal: bool = True) -> Tensor:
    """Random rows (M, D) in float64: directions orthogonal within each block of D, lengths by `norms`."""
    directions = []
    for begin in range(0, rows, width):
        block = torch.randn(width, width, generator=draw, dtype=torch.float64, device="cpu")
        if orthogonal:
            block, triangle = torch.linalg.qr(block)
            block = block * triangle.diagonal().sign()  # or the algorithm's own choice of signs would show
        else:
            block = block / block.norm(dim=1, keepdim=True)
        directions.append(block[: rows - begin])
    return torch.cat(directions) * _lengths(rows, width, norms, draw)[:, None]


def _lengths(rows: int, width: int, norms: Norms, draw: torch.Generator) -> Tensor:
    """The lengths of the rows: those of normal vectors, all the same, or the quantiles of the former, shuffled."""
    if norms == "chi":
        return torch.randn(rows, width, generator=draw, dtype=torch.float64, device="cpu").norm(dim=1)
    if norms == "fixed":
        return torch.full((rows,), math.sqrt(width), dtype=torch.float64, device="cpu")
    shares = torch.arange(1, rows + 1, dtype=torch.float64, device="cpu") / (rows + 1)
    return chi_quantiles(shares, width)[torch.randperm(rows, generator=draw, device="cpu")]


def chi_quantiles(shares: Tensor, width: int) -> Tensor:
    """The lengths R below which so great a share of normal vectors of a width lies: P(|w| <= R) = share."""
    half = torch.full_like(shares, width / 2)
    low, high = torch.zeros_like(shares), torch.full_like(shares, math.sqrt(width) + 20)
    for _ in range(80):  # each bisection gains a bit; float64 has 53
        middle = (low + high) / 2
        below = torch.special.gammainc(half, middle.square() / 2) < shares
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return (low + high) / 2


class Favor(FeatureMap):
    """exp(w . x - |x|^2 / 2) for random rows w, on queries and keys of one length, D^(1/4) times a learned gain.

    Of one length, because features of long keys are 0 in every format: what is lost there no later sum brings back.
    Factors that are the same for all keys, or all features of a query, cancel in the ratio; they are chosen to keep the
    numbers in range without a look at any other token.
    """

    turned_by_position = True

    LARGEST_GAIN = 2.0
    """The gain starts at 1 and approaches 0 and this; sim is then exp(gain^2 sqrt(D) cos(q, k)) in the mean."""

    LARGEST_EXPONENT = 60.0
    """No key's feature exceeds exp of this, so that sums over a million tokens stay below float32's 3e38."""

    def __init__(self, heads: int, width: int, features: int, form: Form, norms: Norms):
        super().__init__(features)
        self.form, self.norms = form, norms
        rows = features // 2 if form == "hyperbolic" else features
        self.raw_gain = nn.Parameter(torch.zeros(heads))
        self.register_buffer("rows", torch.empty(heads, rows, width))
        self.rows: Tensor
        self.redraw(int(torch.randint(2**62, (), device="cpu")))

    @torch.no_grad()
    def redraw(self, seed: int) -> None:
        """Draw all rows anew; states read before mean nothing afterwards."""
        draw = torch.Generator("cpu").manual_seed(seed)
        heads, rows, width = self.rows.shape
        self.rows.copy_(torch.stack([draw_rows(rows, width, self.norms, draw) for _ in range(heads)]))

    def query(self, q: Tensor) -> Tensor:
        exponent = self._projected(self._of_one_length(q))
        return self._exp(exponent - exponent.detach().amax(-1, keepdim=True), q)

    def key(self, k: Tensor) -> Tensor:
        k_long = self._of_one_length(k)
        length, too_large = self.bounds(k_long)
        # the difference is 0 but for keys so small that the guard of their norm shows
        shorter = (length.square() - k_long.square().sum(-1, keepdim=True)) / 2
        return self._exp(self._projected(k_long) + shorter - too_large, k)

    def bounds(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """The length of keys, and what is taken off their exponents, (H, 1, 1), in the type of a tensor like them."""
        length = (self.gain(like) * self.rows.shape[-1] ** 0.25).detach()
        return length, (self.rows.to(like).norm(dim=-1).amax(-1)[:, None, None] * length - self.LARGEST_EXPONENT).relu()

    def _of_one_length(self, x: Tensor) -> Tensor:
        """(B, H, T, D) of mean square 1, times the gain and D^(-1/4), in float32 at least."""
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        return rms_norm(x, x.shape[-1:], eps=1e-6) * (self.gain(x) * x.shape[-1] ** -0.25)

    def gain(self, like: Tensor) -> Tensor:
        """What vectors of one length are scaled by, beside their width: (H, 1, 1)."""
        return (self.LARGEST_GAIN * self.raw_gain.to(like.dtype).sigmoid())[:, None, None]

    def _projected(self, x: Tensor) -> Tensor:
        """w . x of all features, in the type of x: an exponent rounded to bfloat16 would be off by a tenth."""
        with torch.autocast(x.device.type, enabled=False):
            u = x @ self.rows.to(x.dtype).mT
        return torch.cat([u, -u], dim=-1) if self.form == "hyperbolic" else u

    @staticmethod
    def _exp(exponent: Tensor, like: Tensor) -> Tensor:
        """Features in the type of the inputs, but for float16, which cannot hold them."""
        return exponent.exp().to(exponent.dtype if like.dtype == torch.float16 else like.dtype)
