"""Functions with their own backward pass have no second derivative, and refuse one."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lmlong import recipe
from lmlong.attention.encoder.base import BidirectionalLinearAttention
from lmlong.attention.feature_maps import Elu
from lmlong.attention.registry import CAUSAL
from lmlong.model.loss import chunked_cross_entropy


def linear(x: Tensor) -> Tensor:
    attention = CAUSAL["linear"](2, 4, 4, recipe.Attention(decay="none"))
    q = x.view(1, 2, -1, 4)
    return attention(q, q, q, attention.init_state(1, x.device, x.dtype))[0].square().sum()


def encoder(x: Tensor) -> Tensor:
    q = x.view(1, 2, -1, 4)
    return BidirectionalLinearAttention(Elu(4))(q, q, q).square().sum()


def loss(x: Tensor) -> Tensor:
    return chunked_cross_entropy(x.view(-1, 4), torch.eye(4, dtype=x.dtype), torch.arange(12) % 4).square()


@pytest.mark.parametrize("function", [linear, encoder, loss])
def test_a_second_derivative_is_refused(function: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(48, dtype=torch.float64, requires_grad=True)
    (first,) = torch.autograd.grad(function(x), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()
