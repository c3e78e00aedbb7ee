"""The language model beyond the laws: what its options change, and that recomputation changes nothing."""

import math

import torch
from models import predict, stirred

from lmlong import recipe
from lmlong.model.base import count_parameters
from lmlong.model.language_model import LanguageModel
from lmlong.model.segments import text_loss

TOKENS = torch.randint(40, (2, 70), generator=torch.Generator().manual_seed(0))


def build(**options: object) -> LanguageModel:
    torch.manual_seed(0)
    options = {"attention": recipe.Attention(kind="linear"), **options}
    return LanguageModel(recipe.Model(width=32, layers=2, heads=4, **options), 40)  # type: ignore[arg-type]


def test_an_untrained_model_has_the_loss_of_a_uniform_distribution() -> None:
    nats, _ = text_loss(build(), TOKENS, TOKENS.roll(-1, 1))
    assert abs(nats.item() / 140 - math.log(40)) < 0.1


def test_the_number_of_parameters_is_that_of_the_formula() -> None:
    width, inner, vocabulary, heads = 32, 96, 40, 4
    mixer = width + 4 * width**2 + 3 * width * 4 + heads * (width + 1) + width + width**2
    mlp = width + 3 * width * inner
    assert count_parameters(build(mlp_ratio=3.0)) == vocabulary * width + 2 * (mixer + mlp) + width


def test_learned_gates_begin_by_remembering_from_2_to_8192_tokens() -> None:
    model = build(attention=recipe.Attention(kind="linear", decay="learned"))
    kept = model.blocks[0].mixer.forget_gate(torch.randn(1, 1, 32))[0, :, 0].exp()
    assert torch.allclose(1 / (1 - kept), torch.tensor([2.0, 32.0, 512.0, 8192.0]), rtol=1e-3)


def test_rotary_positions_make_order_matter_where_nothing_else_does() -> None:
    """Without positions, gates and convolution, linear attention sees the past as a bag; its last logits say so."""
    plain = {"attention": recipe.Attention(kind="linear", decay="none"), "convolution": 0}
    swapped = TOKENS.clone()
    swapped[:, [3, 10]] = swapped[:, [10, 3]]
    for positions, same in (("none", True), ("rotary", False)):
        options = recipe.Model(width=32, layers=1, heads=4, positions=positions, **plain)  # type: ignore[arg-type]
        model = stirred(LanguageModel(options, 40)).double()
        last = [predict(model, tokens)[0][:, -1] for tokens in (TOKENS, swapped)]
        assert torch.allclose(*last, atol=1e-12) == same
