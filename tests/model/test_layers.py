"""Products with learned matrices, kept whole or rounded."""

import pytest
import torch
from models import stirred
from torch import nn
from torch.testing import assert_close

from lmlong.model.base import count_parameters
from lmlong.model.language_model import LanguageModel
from lmlong.model.layers import QuantizedLinear, SwiGLU
from lmlong.recipe import Model

KEPT = pytest.mark.parametrize("kept", [torch.bfloat16, torch.int8], ids=str)


@KEPT
def test_a_rounded_matrix_is_off_by_its_rounding_alone(kept: torch.dtype) -> None:
    torch.manual_seed(0)
    whole, x = nn.Linear(24, 40, bias=False).double(), torch.randn(3, 24, dtype=torch.float64)
    rounded = QuantizedLinear(whole.weight, kept)
    assert_close(rounded(x), x @ rounded.dequantized(torch.float64).mT, rtol=1e-13, atol=1e-13)
    off = (rounded.dequantized(torch.float64) - whole.weight).abs()
    # bfloat16 keeps 8 bits of each number, int8 makes 254 steps from end to end of each row
    half_a_step = 2**-8 * whole.weight.abs() if kept == torch.bfloat16 else whole.weight.abs().amax(1)[:, None] / 254
    assert (off <= half_a_step * (1 + 1e-9)).all() and (off > 0).any()


def test_a_row_of_zeros_stays_one() -> None:
    assert not QuantizedLinear(torch.zeros(2, 3), torch.int8).dequantized(torch.float32).any()


@KEPT
def test_a_model_of_rounded_matrices_computes_as_precisely_as_before(kept: torch.dtype) -> None:
    options, tokens = Model(width=32, layers=2, heads=2), torch.randint(50, (2, 40))
    model = stirred(LanguageModel(options, 50)).double().eval()
    by_hand = stirred(LanguageModel(options, 50)).double().eval()
    by_hand.load_state_dict(model.state_dict())
    model.quantize(kept)
    with torch.no_grad():
        for module in by_hand.modules():
            if isinstance(module, nn.Linear):
                module.weight.copy_(QuantizedLinear(module.weight, kept).dequantized(torch.float64))
        hidden, _ = by_hand.hidden_states(tokens)
        expected = hidden @ QuantizedLinear(by_hand.embedding.weight, kept).dequantized(torch.float64).mT
        logits, _ = model(tokens)
        assert_close(logits, expected, rtol=1e-12, atol=1e-12)
        state = model.init_state(2)
        for place in range(40):
            step, state = model.step(tokens[:, place], state)
            assert_close(step, logits[:, place], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("kept", "share"), [(torch.bfloat16, 2), (torch.int8, 4)], ids=str)
def test_a_model_of_rounded_matrices_takes_less_memory(kept: torch.dtype, share: int) -> None:
    model = LanguageModel(Model(width=64, layers=2, heads=2), 50)
    before = sum(module.weight.nbytes for module in model.modules() if isinstance(module, nn.Linear))
    learned = count_parameters(model)
    model.quantize(kept)
    assert not any(isinstance(module, nn.Linear) for module in model.modules())
    after = sum(module.weight.nbytes for module in model.modules() if isinstance(module, QuantizedLinear))
    assert after * share == before
    assert count_parameters(model) == learned


@KEPT
def test_the_smallest_mlp_has_the_width_of_one_multiple(kept: torch.dtype) -> None:
    options = Model(width=16, layers=1, heads=2, mlp_ratio=0.01)
    assert SwiGLU(options).out_proj.in_features == 32
    model = stirred(LanguageModel(options, 50)).eval()
    model.quantize(kept)
    assert model(torch.tensor([[3]]))[0].isfinite().all()
