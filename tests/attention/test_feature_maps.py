"""Each feature map against the similarity that defines it, and at extreme scales; what FAVOR+ draws by closed forms."""

import math
from collections.abc import Callable

import pytest
import torch
from attention.cases import HEAD_DIM, HEADS
from attention.cases import build as build_attention
from grids import thinned
from torch import Tensor
from torch.nn.functional import elu
from torch.testing import assert_close

from lmlong import recipe
from lmlong.attention import laws
from lmlong.attention.favor import Favor, Form, Norms, chi_quantiles, draw_projection
from lmlong.attention.feature_map_registry import FEATURE_MAPS
from lmlong.attention.feature_maps import Cosine, FeatureMap, Relu, Softmax, Taylor
from lmlong.recipe.kinds import FEATURE_MAP_KINDS
from lmlong.testing import random_text


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def build(name: str, width: int = HEAD_DIM) -> FeatureMap:
    torch.manual_seed(0)
    return FEATURE_MAPS[name](HEADS, width, recipe.Attention(feature_map=name))  # type: ignore[arg-type]


Q, K = normal(2, HEADS, 50, HEAD_DIM), normal(2, HEADS, 50, HEAD_DIM, seed=1)


def sim(features: FeatureMap, q: Tensor = Q, k: Tensor = K) -> Tensor:
    return features.query(q) @ features.key(k).mT


@pytest.mark.parametrize("name", FEATURE_MAPS)
def test_recipes_know_which_features_have_signs(name: str) -> None:
    features = build(name).double()
    negative = bool((features.query(Q) < 0).any())
    assert features.signed == FEATURE_MAP_KINDS[name].signed == negative


@pytest.mark.parametrize(
    ("name", "truth"),
    [
        ("elu", lambda x: elu(x) + 1 + 1e-4),
        ("relu", lambda x: x.relu() + Relu.FLOOR),
        ("softmax", lambda x: x.softmax(-1) + Softmax.FLOOR),
    ],
)
def test_features_and_slopes_in_closed_form(name: str, truth: Callable[[Tensor], Tensor]) -> None:
    x = Q.clone().requires_grad_()
    features, exact = build(name).query(x), truth(x)
    assert_close(features, exact, rtol=0, atol=1e-12)
    slopes = (torch.autograd.grad(y.square().sum(), x)[0] for y in (features, exact))
    assert_close(*slopes, rtol=0, atol=1e-12)


def test_cosine_is_one_plus_the_cosine() -> None:
    truth = 1 + Cosine.SHRINK**2 * torch.nn.functional.cosine_similarity(Q[..., :, None, :], K[..., None, :, :], dim=-1)
    assert torch.allclose(sim(build("cosine")), truth, atol=1e-5)


def test_cosine_of_opposite_vectors_stays_positive_in_bfloat16() -> None:
    """Along an axis, where nothing averages out, and in all directions."""
    features = build("cosine", 16)
    axes = torch.cat([torch.eye(16), normal(400, 16).float()]).bfloat16().expand(1, HEADS, -1, -1)
    opposite = (features.query(axes).float() * features.key(-axes).float()).sum(-1)
    assert opposite.min() > 0.005


def test_hedgehog_weighs_as_the_exponentials_of_both_signs_do() -> None:
    """But for one factor for each query and each key."""
    features = build("hedgehog").double()
    with torch.no_grad():
        features.query_projection += normal(HEADS, HEAD_DIM, HEAD_DIM, seed=2)
    q, k = (torch.cat([x, -x], dim=-1).exp() for x in (Q @ features.query_projection, K @ features.key_projection))
    sums = [x.sum(-1) for x in (q, k)]
    floors = Softmax.FLOOR * (2 + 2 * HEAD_DIM * Softmax.FLOOR)
    assert torch.allclose(sim(features), q @ k.mT / (sums[0][..., :, None] * sums[1][..., None, :]) + floors)


@pytest.mark.parametrize("projected", [5, None])
def test_taylor_is_the_exponential_to_second_order(projected: int | None) -> None:
    torch.manual_seed(0)
    features = Taylor(HEADS, HEAD_DIM, projected).double()
    size = projected or HEAD_DIM
    q, k = (Q @ features.query_projection, K @ features.key_projection) if projected else (Q, K)
    s = size**0.5 * torch.nn.functional.cosine_similarity(q[..., :, None, :], k[..., None, :, :], dim=-1)
    assert torch.allclose(sim(features), 1 + s + s.square() / 2, rtol=1e-4)
    assert features.features == features.query(Q).shape[-1] == 1 + size + size * (size + 1) // 2


@thinned(
    pytest.mark.parametrize("name", FEATURE_MAPS),
    pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str),
)
def test_similarities_stay_finite_and_positive_at_head_width_128(name: str, dtype: torch.dtype) -> None:
    features = build(name, 128)
    for scale in (1e-4, 1.0, 5.0, 100.0):
        q, k = (scale * normal(1, HEADS, 200, 128, seed=seed).to(dtype) for seed in (0, 1))
        for keys in (k, q, -q):  # random, the same and the opposite direction
            products = (features.query(q).float() * features.key(keys).float()).sum(-1)
            assert products.isfinite().all()
            assert products.min() > 1e-25


WIDTH = 16


def draw(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def unit_rows(rows: int, seed: int = 0) -> Tensor:
    """Vectors of mean square 1, as favor makes all queries and keys."""
    x = normal(1, HEADS, rows, WIDTH, seed=seed)
    return x / x.square().mean(-1, keepdim=True).sqrt()


def favor(features: int, form: Form = "positive", norms: Norms = "chi") -> Favor:
    torch.manual_seed(0)
    return Favor(HEADS, WIDTH, features, form, norms).double()


def test_favor_rows_are_orthogonal_within_each_block() -> None:
    rows = draw_projection(40, WIDTH, "chi", draw())
    assert rows.shape == (40, WIDTH)
    for block in rows.split(WIDTH):
        directions = block / block.norm(dim=1, keepdim=True)
        assert torch.allclose(directions @ directions.mT, torch.eye(len(block), dtype=torch.float64), atol=1e-12)


def test_favor_directions_are_uniform() -> None:
    """The mean of many draws is 0 in every coordinate, which the bare signs of a QR decomposition would not give."""
    directions = torch.stack([draw_projection(4, 4, "fixed", draw(seed)) for seed in range(4000)]) / 2
    assert directions.mean(0).abs().max() < 0.04  # 5 deviations of 1 / sqrt(4 * 4000)


def test_favor_quantiles_of_lengths_in_two_dimensions_have_a_closed_form() -> None:
    shares = torch.linspace(0.001, 0.999, 50, dtype=torch.float64)
    assert torch.allclose(chi_quantiles(shares, 2), (-2 * (1 - shares).log()).sqrt(), atol=1e-12)


def test_favor_lengths() -> None:
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
def test_favor_weights_are_those_of_softmax(form: Form, norms: Norms, gain: float) -> None:
    features = favor(20_000, form, norms)
    torch.nn.init.constant_(features.raw_gain, math.log(gain / (2 - gain)))
    q, k = unit_rows(30), unit_rows(30, seed=1)
    weights = features.query(q) @ features.key(k).mT
    truth = (gain**2 * q @ k.mT / WIDTH**0.5).softmax(-1)
    assert (weights / weights.sum(-1, keepdim=True) - truth).norm() / truth.norm() < 0.03


def test_a_favor_draw_is_a_function_of_its_seed_and_saved_with_the_weights() -> None:
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
def test_favor_features_stay_in_range_at_any_gain_in_bfloat16(form: Form, gain: float, width: int) -> None:
    torch.manual_seed(0)
    features = Favor(1, width, 2 * width, form, "chi")
    torch.nn.init.constant_(features.raw_gain, gain)
    # along the longest row and against it, where exponents are largest, and at random
    extreme = features.projection[0, features.projection[0].norm(dim=1).argmax()]
    x = torch.cat([extreme[None], -extreme[None], normal(500, width).float()])[None, None].bfloat16()
    k = features.key(x).float()
    assert k.isfinite().all() and k.amax(-1).min() > 1e-25 and k.max() < 1e27
    assert features.query(x).float().amax(-1).min() == 1.0
    assert (features.query(x).float() * k).sum(-1).min() > 1e-28


@torch.no_grad()
def test_favor_constants_are_in_float32_whatever_the_weights_are_in() -> None:
    attention = build_attention(recipe.Attention(kind="linear", feature_map="favor", decay="none")).bfloat16()
    x = random_text(attention, 40, torch.float32)
    assert x[0] is not None
    assert laws.steps_equal_forward(laws.of_attention(attention, x[0]), x) < 2e-5
