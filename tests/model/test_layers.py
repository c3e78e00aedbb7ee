"""Products with learned matrices, in float32 or in fewer bits, and in training for those."""

import pytest
import torch
from models import predict, stirred
from torch import nn
from torch.testing import assert_close

from lmlong import recipe
from lmlong.attention.device_policy import GPU_POLICY, use_policy
from lmlong.decode.choice import why_no_fast_engine
from lmlong.model.base import count_parameters, quantize, round_weights
from lmlong.model.language_model import LanguageModel
from lmlong.model.layers import BFloat16Linear, GroupedLinear, RMSNorm, SwiGLU, quantized_linear
from lmlong.model.learning.read import score
from lmlong.model.metrics import text_nll
from lmlong.model.quantization import GroupFormat, WeightFormat, quantized
from lmlong.model.segments import text_loss
from lmlong.model.weight_panels import rounded_activations
from lmlong.recipe import Model

TOKENS = torch.randint(40, (2, 48), generator=torch.Generator().manual_seed(0))
every_format = pytest.mark.parametrize("weights", ["bf16", "int8", "int4"])


def test_bfloat16_keeps_8_bits_of_each_weight() -> None:
    torch.manual_seed(0)
    whole, x = nn.Linear(24, 40, bias=False).double(), torch.randn(3, 24, dtype=torch.float64)
    quantized = BFloat16Linear(whole.weight)
    assert_close(quantized(x), x @ quantized.dequantized(torch.float64).mT, rtol=1e-13, atol=1e-13)
    off = (quantized.dequantized(torch.float64) - whole.weight).abs()
    assert (off <= 2**-8 * whole.weight.abs()).all() and (off > 0).any()


def test_a_gpu_rounds_what_bfloat16_weights_multiply() -> None:
    torch.manual_seed(0)
    layer, x = BFloat16Linear(torch.randn(40, 24)), torch.randn(3, 24)
    use_policy(layer, GPU_POLICY)
    with torch.no_grad():
        found, exact = layer(x), x.bfloat16().double() @ layer.dequantized(torch.float64).mT
    assert found.dtype == torch.float32
    assert_close(found.double(), exact, rtol=2**-8, atol=1e-6)
    wide = torch.randn(3, 24, dtype=torch.float64)
    assert_close(layer(wide), wide @ layer.dequantized(torch.float64).mT, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_norm_before_a_product_has_its_dtype(dtype: torch.dtype) -> None:
    x, norm = torch.randn(70, 24, generator=torch.Generator().manual_seed(0)), RMSNorm(24, epsilon=1e-6)
    with torch.autocast("cpu", dtype):
        y = norm(x, for_product=True)
    assert y.dtype == dtype
    assert_close(y.float(), norm(x), rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_a_matrix_in_groups_multiplies_rounded_inputs(weights: WeightFormat) -> None:
    torch.manual_seed(0)
    whole, x = nn.Linear(50, 40, bias=False), torch.randn(2, 3, 50, dtype=torch.float64)
    quantized = quantized_linear(whole.weight, weights)
    exact = rounded_activations(x) @ quantized.dequantized(torch.float64).mT
    assert_close(quantized(x), exact, rtol=1e-13, atol=1e-13)
    with torch.no_grad():
        for dtype, error in ((torch.float32, 1e-6), (torch.bfloat16, 2**-7)):
            found = quantized(x.to(dtype))
            assert found.dtype == dtype
            expected = rounded_activations(x.to(dtype).double()) @ quantized.dequantized(torch.float64).mT
            assert_close(found.double(), expected, rtol=error, atol=error)


def test_gradients_pass_through_the_rounding() -> None:
    torch.manual_seed(0)
    quantized = quantized_linear(torch.randn(5, 40), "int4")
    x = torch.randn(3, 40, requires_grad=True)
    (dx,) = torch.autograd.grad(quantized(x).sum(), x)
    assert_close(dx, quantized.dequantized(torch.float32).sum(0).expand(3, 40))


@every_format
def test_a_quantized_model_in_float64_is_that_of_dequantized_weights(weights: WeightFormat) -> None:
    options, tokens = Model(width=32, layers=2, heads=2), torch.randint(50, (2, 40))
    model = stirred(LanguageModel(options, 50)).double().eval()
    by_hand = stirred(LanguageModel(options, 50)).double().eval()
    by_hand.load_state_dict(model.state_dict())
    quantize(model, weights)
    round_inputs = (lambda x: x) if weights == "bf16" else rounded_activations
    with torch.no_grad():
        for module in by_hand.modules():
            if isinstance(module, nn.Linear):
                module.weight.copy_(quantized_linear(module.weight, weights).dequantized(torch.float64))
                module.register_forward_pre_hook(lambda _, inputs: round_inputs(inputs[0]))
        hidden, _ = by_hand(tokens)
        output = quantized_linear(by_hand.embedding.weight, "int8" if weights == "int4" else weights)
        expected = round_inputs(hidden) @ output.dequantized(torch.float64).mT
        logits, _ = predict(model, tokens)
        assert_close(logits, expected, rtol=1e-12, atol=1e-12)
        state = model.init_state(2)
        for place in range(40):
            step, state = model.step(tokens[:, place], state)
            assert_close(step, logits[:, place], rtol=1e-10, atol=1e-10)


@every_format
@torch.no_grad()
def test_scores_are_those_of_the_logits(weights: WeightFormat) -> None:
    model = build().eval()
    quantize(model, weights)
    logits, _ = predict(model, TOKENS)
    expected = nn.functional.cross_entropy(logits.mT, TOKENS.roll(-1, 1), reduction="none")
    for found, _ in (text_nll(model, TOKENS, TOKENS.roll(-1, 1)), score(model, TOKENS, TOKENS.roll(-1, 1))):
        assert_close(found, expected)


@pytest.mark.parametrize(("weights", "bits"), [("bf16", 16), ("int8", 8.5), ("int4", 5)])
def test_a_quantized_model_takes_less_memory(weights: WeightFormat, bits: float) -> None:
    model = LanguageModel(Model(width=64, layers=2, heads=2), 50)
    numbers = sum(module.weight.numel() for module in model.modules() if isinstance(module, nn.Linear))
    learned = count_parameters(model)
    quantize(model, weights)
    assert not any(isinstance(module, nn.Linear) for module in model.modules())
    quantized = [module for module in model.modules() if isinstance(module, (BFloat16Linear, GroupedLinear))]
    assert (
        sum(x.nbytes for module in quantized for x in (*module.parameters(), *module.buffers())) == numbers * bits / 8
    )
    assert count_parameters(model) == learned


def test_the_smallest_mlp_has_32_inner_channels() -> None:
    options = Model(width=16, layers=1, heads=2, mlp_ratio=0.01)
    assert SwiGLU(options).out_proj.in_features == 32
    model = stirred(LanguageModel(options, 50)).eval()
    quantize(model, "int4")
    assert predict(model, torch.tensor([[3]]))[0].isfinite().all()


each_format = pytest.mark.parametrize("rounding", ["int4", "int8"])


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
