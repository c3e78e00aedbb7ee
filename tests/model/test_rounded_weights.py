"""Models that compute with rounded weights, as in training for quantized decoding."""

import pytest
import torch
from models import stirred
from torch import nn
from torch.nn.functional import linear
from torch.testing import assert_close

from lmlong import recipe
from lmlong.decode.choice import why_no_fast_engine
from lmlong.model.base import round_weights
from lmlong.model.language_model import LanguageModel
from lmlong.model.layers import Linear
from lmlong.model.quantization import GroupFormat, quantized
from lmlong.model.segments import text_loss

TOKENS = torch.randint(40, (2, 48), generator=torch.Generator().manual_seed(0))
FORMATS: tuple[GroupFormat, ...] = ("int4", "int8")
each_format = pytest.mark.parametrize("rounding", FORMATS)


def build(**options: object) -> LanguageModel:
    torch.manual_seed(0)
    return stirred(LanguageModel(recipe.Model(width=48, layers=3, heads=4, **options), 40))  # type: ignore[arg-type]


def rounded_by_hand(model: LanguageModel, rounding: GroupFormat) -> LanguageModel:
    """A copy of a model with untied weights, whose matrices have the values of the grid."""
    by_hand = LanguageModel(recipe.Model(width=48, layers=3, heads=4, tied_output=False), 40)
    by_hand.load_state_dict(model.state_dict())
    matrices = [module for module in by_hand.modules() if isinstance(module, nn.Linear)]
    with torch.no_grad():
        for module in matrices:
            module.weight.copy_(quantized(module.weight, rounding).dequantized())
        output = by_hand.lm_head.output.weight
        output.copy_(quantized(output, "int8").dequantized())
    return by_hand


@each_format
def test_products_and_gradients_are_those_of_the_rounded_matrix(rounding: GroupFormat) -> None:
    torch.manual_seed(0)
    layer, x, dy = Linear(70, 9), torch.randn(5, 70, requires_grad=True), torch.randn(5, 9)
    layer.rounding = rounding
    on_grid = quantized(layer.weight, rounding).dequantized()
    assert not torch.equal(on_grid, layer.weight)
    y = layer(x)
    dx, dw = torch.autograd.grad(y, (x, layer.weight), dy)
    assert torch.equal(y, linear(x, on_grid))
    assert_close(dx, dy @ on_grid)
    assert_close(dw, dy.mT @ x)


@each_format
def test_a_model_computes_as_one_whose_matrices_are_on_the_grid(rounding: GroupFormat) -> None:
    """With the gradients of that model, the output layer's and the embedding's too."""
    model = build(tied_output=False)
    by_hand = rounded_by_hand(model, rounding)
    plain = text_loss(model, TOKENS, TOKENS.roll(-1, 1))[0].item()
    round_weights(model, rounding)
    values, gradients = [], []
    for each in (model, by_hand):
        nats, _ = text_loss(each, TOKENS, TOKENS.roll(-1, 1))
        values.append(nats.item())
        gradients.append(torch.autograd.grad(nats, list(each.parameters())))
    assert values[0] == values[1] != plain
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    round_weights(model, None)
    assert text_loss(model, TOKENS, TOKENS.roll(-1, 1))[0].item() == plain


@each_format
def test_a_tied_embedding_is_looked_up_as_it_is(rounding: GroupFormat) -> None:
    model = build()
    round_weights(model, rounding)
    hidden, _ = model(TOKENS)
    on_grid = quantized(model.embedding.weight, "int8").dequantized()
    assert_close(model.logits(hidden), hidden @ on_grid.mT)
    x, _ = model.embed(TOKENS, model.init_state(2), None)
    assert torch.equal(x, model.embedding(TOKENS) * model.embedding_scale)


def test_native_code_refuses_rounded_weights() -> None:
    model = build()
    for name in ("lm_head", "blocks.0.mixer.in_proj", "blocks.0.mixer.out_proj"):
        module = model.get_submodule(name)
        module.rounding = "int4"
        assert why_no_fast_engine(model) == f"{name}: computes with its weight rounded to int4."
        module.rounding = None
    assert why_no_fast_engine(model) is None
