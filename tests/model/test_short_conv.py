"""The short convolution against torch's own, and its gradients against differences."""

import pytest
import torch
from torch.nn.functional import conv1d, normalize, pad, silu

from lmlong import recipe
from lmlong.model.language_model import LanguageModel
from lmlong.model.short_conv import ShortConvolution


def build(channels: int = 5, width: int = 4) -> ShortConvolution:
    torch.manual_seed(0)
    convolution = ShortConvolution(channels, width).double()
    torch.nn.init.normal_(convolution.weight)
    return convolution


def test_outputs_are_those_of_a_causal_convolution() -> None:
    convolution, x = build(), torch.randn(2, 300, 5, dtype=torch.float64)
    y, _ = convolution(x, convolution.init_state(2, x.device, x.dtype), _count(2, 300))
    truth = conv1d(pad(x.mT, (3, 0)), convolution.weight[:, None], groups=5).mT
    assert torch.allclose(y, truth, atol=1e-12)


def test_gradients_are_those_of_finite_differences() -> None:
    starts = torch.zeros(2, 9, dtype=torch.bool)
    starts[:, 4] = True
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]] * 2)

    def run(x: torch.Tensor, tail: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        fresh = build()
        del fresh.weight
        fresh.weight = weight
        return fresh(x, tail, positions, starts)

    leaves = [torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((2, 9, 5), (2, 3, 5), (5, 4))]
    assert torch.autograd.gradcheck(run, leaves)


def _count(batch: int, time: int) -> torch.Tensor:
    return torch.arange(time).expand(batch, time)


@pytest.mark.parametrize("width", [2, 3, 4, 8])
def test_keys_of_the_delta_rule_begin_as_the_queries_of_the_token_before(width: int) -> None:
    """So that a model finds what followed its last tokens before it has learned anything."""
    torch.manual_seed(0)
    shape = recipe.Model(width=96, layers=1, heads=1, attention=recipe.Attention(kind="delta"), convolution=width)
    model = LanguageModel(shape, 300)
    said = torch.randperm(300)[:20]
    found: dict[str, torch.Tensor] = {}
    mixer = model.blocks[0].mixer
    mixer.attention.register_forward_pre_hook(lambda _, given: found.update(q=given[0][0, 0], k=given[1][0, 0]))
    model(torch.cat([said, said])[None])
    q, k = (normalize(silu(found[name]), dim=-1) for name in ("q", "k"))
    alike = q @ k.T
    assert (alike[20:39].argmax(-1) % 20 == torch.arange(1, 20)).all()  # the token after it, here or there
    assert alike.diagonal(1)[width:].min() > 0.85 and alike.diagonal(0)[width:].mean() < 0.6


@pytest.mark.parametrize("kind", ["linear", "window"])
def test_other_attentions_begin_near_the_identity(kind: str) -> None:
    model = LanguageModel(recipe.Model(width=32, layers=1, heads=2, attention=recipe.Attention(kind=kind)), 50)
    convolution = model.blocks[0].mixer.convolution
    assert convolution is not None
    assert (convolution.weight[:, -1] - 1).abs().mean() < 0.2 and convolution.weight[:, :-1].abs().mean() < 0.2
