"""Each feature map against the similarity that defines it, and at extreme scales."""

import pytest
import torch
from attention.cases import HEAD_DIM, HEADS
from grids import thinned
from torch import Tensor

from lmlong import recipe
from lmlong.attention.feature_map_registry import FEATURE_MAPS
from lmlong.attention.feature_maps import Cosine, FeatureMap, Relu, Softmax, Taylor
from lmlong.recipe.kinds import FEATURE_MAP_KINDS


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


def test_elu_is_elu_plus_one_with_a_slope_to_match() -> None:
    x = Q.clone().requires_grad_()
    truth = torch.nn.functional.elu(x) + 1
    mine = build("elu").query(x)
    assert torch.allclose(mine, truth + 1e-4, atol=1e-12)
    slopes = [torch.autograd.grad(y.square().sum(), x)[0] for y in (mine - 1e-4, truth)]
    assert torch.allclose(*slopes, atol=1e-12)


def test_relu_never_reaches_zero() -> None:
    features = build("relu").query(Q)
    assert features.min() == Relu.FLOOR
    assert torch.equal(features > Relu.FLOOR, Q > 0)
    assert torch.allclose(features[Q > 0], Q[Q > 0] + Relu.FLOOR)


def test_cosine_is_one_plus_the_cosine() -> None:
    truth = 1 + Cosine.SHRINK**2 * torch.nn.functional.cosine_similarity(Q[..., :, None, :], K[..., None, :, :], dim=-1)
    assert torch.allclose(sim(build("cosine")), truth, atol=1e-5)


def test_cosine_of_opposite_vectors_stays_positive_in_bfloat16() -> None:
    """Along an axis, where nothing averages out, and in all directions."""
    features = build("cosine", 16)
    axes = torch.cat([torch.eye(16), normal(400, 16).float()]).bfloat16().expand(1, HEADS, -1, -1)
    opposite = (features.query(axes).float() * features.key(-axes).float()).sum(-1)
    assert opposite.min() > 0.005


def test_softmax_features_of_a_token_sum_to_one() -> None:
    total = build("softmax").query(Q).sum(-1)
    assert torch.allclose(total, torch.full_like(total, 1 + HEAD_DIM * Softmax.FLOOR), atol=1e-12)
    one_hot = torch.eye(HEAD_DIM)[None, None] * 1e4
    assert (sim(build("softmax"), one_hot, one_hot.roll(1, -1)) >= 2 * Softmax.FLOOR).all()


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
