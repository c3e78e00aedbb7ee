"""FAVOR+ against the exponential it estimates, and the lengths and directions of its rows against closed forms."""

import math

import pytest
import torch
from attention.cases import build
from grids import thinned
from torch import Tensor

from lmlong import recipe
from lmlong.attention import laws
from lmlong.attention.favor import Favor, Form, Norms, chi_quantiles, draw_projection
from lmlong.testing import random_text

HEADS, WIDTH = 2, 16


def draw(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def unit_rows(rows: int, seed: int = 0) -> Tensor:
    """Vectors of mean square 1, as favor makes all queries and keys."""
    x = torch.randn(1, HEADS, rows, WIDTH, generator=draw(seed), dtype=torch.float64)
    return x / x.square().mean(-1, keepdim=True).sqrt()


def favor(features: int, form: Form = "positive", norms: Norms = "chi") -> Favor:
    torch.manual_seed(0)
    return Favor(HEADS, WIDTH, features, form, norms).double()


def test_rows_are_orthogonal_within_each_block() -> None:
    rows = draw_projection(40, WIDTH, "chi", draw())
    assert rows.shape == (40, WIDTH)
    for block in rows.split(WIDTH):
        directions = block / block.norm(dim=1, keepdim=True)
        assert torch.allclose(directions @ directions.mT, torch.eye(len(block), dtype=torch.float64), atol=1e-12)


def test_directions_are_uniform() -> None:
    """The mean of many draws is 0 in every coordinate, which the bare signs of a QR decomposition would not give."""
    directions = torch.stack([draw_projection(4, 4, "fixed", draw(seed)) for seed in range(4000)]) / 2
    assert directions.mean(0).abs().max() < 0.04  # 5 deviations of 1 / sqrt(4 * 4000)


def test_quantiles_of_lengths_in_two_dimensions_have_a_closed_form() -> None:
    shares = torch.linspace(0.001, 0.999, 50, dtype=torch.float64)
    assert torch.allclose(chi_quantiles(shares, 2), (-2 * (1 - shares).log()).sqrt(), atol=1e-12)


def test_lengths_of_rows() -> None:
    assert torch.allclose(
        draw_projection(30, WIDTH, "fixed", draw()).norm(dim=1), torch.tensor(4.0, dtype=torch.float64)
    )
    lengths = draw_projection(31, WIDTH, "quantile", draw()).norm(dim=1).sort().values
    assert torch.allclose(lengths, chi_quantiles(torch.arange(1, 32, dtype=torch.float64) / 32, WIDTH))
    assert lengths[15] == pytest.approx(3.9164, abs=1e-3)  # the median: sqrt of 15.338
    sampled = draw_projection(20_000, WIDTH, "chi", draw()).norm(dim=1)
    assert sampled.square().mean() == pytest.approx(WIDTH, rel=0.01)
    assert sampled.var() == pytest.approx(0.4924, rel=0.05)  # 16 - (sqrt 2 gamma(8.5) / gamma(8))^2


@thinned(
    pytest.mark.parametrize("form", ["positive", "hyperbolic"]),
    pytest.mark.parametrize("norms", ["chi", "quantile"]),
    pytest.mark.parametrize("gain", [0.3, 0.5]),
)
def test_weights_are_those_of_softmax(form: Form, norms: Norms, gain: float) -> None:
    features = favor(20_000, form, norms)
    torch.nn.init.constant_(features.raw_gain, math.log(gain / (2 - gain)))
    q, k = unit_rows(30), unit_rows(30, seed=1)
    weights = features.query(q) @ features.key(k).mT
    truth = (gain**2 * q @ k.mT / WIDTH**0.5).softmax(-1)
    assert (weights / weights.sum(-1, keepdim=True) - truth).norm() / truth.norm() < 0.03


def test_a_draw_is_a_function_of_its_seed_and_saved_with_the_weights() -> None:
    first, second = favor(32), favor(32)
    assert torch.equal(first.projection, second.projection)
    second.resample(7)
    assert not torch.equal(first.projection, second.projection)
    first.resample(7)
    assert torch.equal(first.projection, second.projection)
    second.resample(8)
    first.load_state_dict(second.state_dict())
    assert torch.equal(first.projection, second.projection)
    assert not torch.equal(first.projection[0], first.projection[1])  # each head its own


@thinned(
    pytest.mark.parametrize("gain", [-8.0, 0.0, 8.0]),
    pytest.mark.parametrize("form", ["positive", "hyperbolic"]),
    pytest.mark.parametrize("width", [64, 256, 1024]),
)
def test_features_stay_in_range_at_any_gain_in_bfloat16(form: Form, gain: float, width: int) -> None:
    torch.manual_seed(0)
    features = Favor(1, width, 2 * width, form, "chi")
    torch.nn.init.constant_(features.raw_gain, gain)
    # along the longest row and against it, where exponents are largest, and at random
    extreme = features.projection[0, features.projection[0].norm(dim=1).argmax()]
    x = torch.cat([extreme[None], -extreme[None], torch.randn(500, width, generator=draw())])[None, None].bfloat16()
    k = features.key(x).float()
    assert k.isfinite().all() and k.amax(-1).min() > 1e-25 and k.max() < 1e27
    assert features.query(x).float().amax(-1).min() == 1.0
    assert (features.query(x).float() * k).sum(-1).min() > 1e-28


@torch.no_grad()
def test_constants_are_in_float32_whatever_the_weights_are_in() -> None:
    attention = build(recipe.Attention(kind="linear", feature_map="favor", decay="none")).bfloat16()
    x = random_text(attention, 40, torch.float32)
    assert x[0] is not None
    assert laws.steps_equal_forward(laws.of_attention(attention, x[0]), x) < 2e-5
