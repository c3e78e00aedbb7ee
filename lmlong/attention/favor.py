"""FAVOR+ (Choromanski et al. 2021): random features whose products are softmax's exponential in expectation.

    exp(q . k) = E_w [exp(w . q - |q|^2 / 2) exp(w . k - |k|^2 / 2)],  w a normal vector

B batch, H heads, T time, D head dim, M random rows.
"""

import math
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm

from lmlong.attention.feature_maps import RMS_EPS, FeatureMap
from lmlong.recipe.kinds import FEATURE_MAP_KINDS

Norms = Literal["chi", "fixed", "quantile"]
Form = Literal["positive", "hyperbolic"]


def draw_projection(rows: int, width: int, norms: Norms, draw: torch.Generator) -> Tensor:
    """Draw random rows (M, D) in float64: directions orthogonal within each block of D, lengths by `norms`."""
    directions = []
    for begin in range(0, rows, width):
        block, triangle = torch.linalg.qr(torch.randn(width, width, generator=draw, dtype=torch.float64, device="cpu"))
        block = block * triangle.diagonal().sign()  # otherwise the signs depend on the QR algorithm
        directions.append(block[: rows - begin])
    return torch.cat(directions) * _lengths(rows, width, norms, draw)[:, None]


def _lengths(rows: int, width: int, norms: Norms, draw: torch.Generator) -> Tensor:
    """Return the lengths of the rows: lengths of normal vectors, one fixed length, or shuffled quantiles of the chi
    distribution."""
    if norms == "chi":
        return torch.randn(rows, width, generator=draw, dtype=torch.float64, device="cpu").norm(dim=1)
    if norms == "fixed":
        return torch.full((rows,), math.sqrt(width), dtype=torch.float64, device="cpu")
    shares = torch.arange(1, rows + 1, dtype=torch.float64, device="cpu") / (rows + 1)
    return chi_quantiles(shares, width)[torch.randperm(rows, generator=draw, device="cpu")]


def chi_quantiles(shares: Tensor, width: int) -> Tensor:
    """Return the quantiles R of the lengths of normal vectors of `width`: P(|w| <= R) = share."""
    half = torch.full_like(shares, width / 2)
    low, high = torch.zeros_like(shares), torch.full_like(shares, math.sqrt(width) + 20)
    for _ in range(80):  # each bisection gains a bit; float64 has 53
        middle = (low + high) / 2
        below = torch.special.gammainc(half, middle.square() / 2) < shares
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return (low + high) / 2


class Favor(FeatureMap):
    """exp(w . x - |x|^2 / 2) for random rows w. Queries and keys are normalized to D^(1/4) times a learned gain.

    Without the normalization, features of long keys underflow to 0 in every format, and no later sum recovers them.
    Factors that are the same for all keys, or for all features of a query, cancel in the ratio. They are chosen to keep
    the numbers in range without looking at any other token.
    """

    uses_rope = FEATURE_MAP_KINDS["favor"].uses_rope

    LARGEST_EXPONENT = 60.0
    """Largest exponent of a key's feature, so that sums over a million tokens stay below float32's 3e38."""

    LARGEST_LENGTHS = 130.0
    """Bound of the longest row's length times the length of keys. The excess over LARGEST_EXPONENT is subtracted from
    all exponents, and the features of keys that resemble no row must not underflow."""

    def __init__(self, heads: int, width: int, features: int, form: Form, norms: Norms):
        super().__init__(features)
        self.form, self.norms = form, norms
        rows = features // 2 if form == "hyperbolic" else features
        self.raw_gain = nn.Parameter(torch.zeros(heads))
        longest = math.sqrt(width) + 4  # length of a row: lengths have a standard deviation of 0.7
        self.largest_gain = min(2.0, self.LARGEST_LENGTHS / (width**0.25 * longest))
        self.register_buffer("projection", torch.empty(heads, rows, width))
        self.projection: Tensor
        self.resample(int(torch.randint(2**62, (), device="cpu")))

    @torch.no_grad()
    def resample(self, seed: int) -> None:
        """Redraw all rows. States of the old features become meaningless."""
        draw = torch.Generator("cpu").manual_seed(seed)
        heads, rows, width = self.projection.shape
        self.projection.copy_(torch.stack([draw_projection(rows, width, self.norms, draw) for _ in range(heads)]))

    def query(self, q: Tensor) -> Tensor:
        exponent = self._projected(self._of_one_length(q))
        return self._exp(exponent - exponent.detach().amax(-1, keepdim=True), q)

    def key(self, k: Tensor) -> Tensor:
        k_long = self._of_one_length(k)
        length, too_large = self.bounds(k_long)
        # nonzero only for keys so small that the epsilon of the norm matters
        shorter = (length.square() - k_long.square().sum(-1, keepdim=True)) / 2
        return self._exp(self._projected(k_long) + shorter - too_large, k)

    def bounds(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return the length of keys and the offset of their exponents, (H, 1, 1), in the dtype of `like`."""
        length = (self.gain(like) * self.projection.shape[-1] ** 0.25).detach()
        return length, (
            self.projection.to(like).norm(dim=-1).amax(-1)[:, None, None] * length - self.LARGEST_EXPONENT
        ).relu()

    def native_constants(self) -> Tensor:
        """Return what native code needs besides the projection, (H, 1, 3): the scale of normalized vectors, half the
        squared length of keys, and the offset of their exponents."""
        wide = self.projection.to(torch.promote_types(self.projection.dtype, torch.float32))
        length, too_large = self.bounds(wide)
        scale = self.gain(wide) * wide.shape[-1] ** -0.25
        return torch.cat([scale, length.square() / 2, too_large], dim=-1)

    def _of_one_length(self, x: Tensor) -> Tensor:
        """Return x (B, H, T, D) normalized to mean square 1, times the gain and D^(-1/4), in at least float32."""
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        return rms_norm(x, x.shape[-1:], eps=RMS_EPS) * (self.gain(x) * x.shape[-1] ** -0.25)

    def gain(self, like: Tensor) -> Tensor:
        """Return the learned scale (H, 1, 1) of normalized vectors, besides their scale by width. It starts at half its
        bound, which is 1 for heads up to width 185. On average sim is exp(gain^2 sqrt(D) cos(q, k))."""
        return (self.largest_gain * self.raw_gain.to(like.dtype).sigmoid())[:, None, None]

    def _projected(self, x: Tensor) -> Tensor:
        """Return w . x for all features, in the dtype of x: an exponent rounded to bfloat16 is off by up to a tenth."""
        with torch.autocast(x.device.type, enabled=False):
            u = x @ self.projection.to(x.dtype).mT
        return torch.cat([u, -u], dim=-1) if self.form == "hyperbolic" else u

    @staticmethod
    def _exp(exponent: Tensor, like: Tensor) -> Tensor:
        """Return features in the dtype of the inputs, except float16, which overflows."""
        return exponent.exp().to(exponent.dtype if like.dtype == torch.float16 else like.dtype)
