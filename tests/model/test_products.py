"""Products with learned matrices, kept whole or rounded."""

import torch
from models import stirred
from torch.testing import assert_close

from lmlong.model.language_model import LanguageModel, parameters
from lmlong.model.products import Product, Rounded
from lmlong.recipe import Model


def test_a_rounded_matrix_is_off_by_its_rounding_alone() -> None:
    torch.manual_seed(0)
    whole, x = Product(24, 40).double(), torch.randn(3, 24, dtype=torch.float64)
    assert_close(Rounded(whole.weight)(x), x @ whole.weight.bfloat16().double().mT, rtol=1e-13, atol=1e-13)


def test_a_model_of_rounded_matrices_computes_as_precisely_as_before() -> None:
    options, tokens = Model(width=32, layers=2, heads=2), torch.randint(50, (2, 40))
    model = stirred(LanguageModel(options, 50)).double().eval()
    by_hand = stirred(LanguageModel(options, 50)).double().eval()
    by_hand.load_state_dict(model.state_dict())
    model.round_matrices()
    with torch.no_grad():
        for module in by_hand.modules():
            if isinstance(module, Product):
                module.weight.copy_(module.weight.bfloat16())
        hidden, _ = by_hand.read(tokens)
        expected = hidden @ by_hand.embedding.weight.bfloat16().double().mT
        logits, _ = model.prefill(tokens)
        assert_close(logits, expected, rtol=1e-12, atol=1e-12)
        state = model.init_state(2)
        for place in range(40):
            step, state = model.step(tokens[:, place], state)
            assert_close(step, logits[:, place], rtol=1e-10, atol=1e-10)


def test_a_model_of_rounded_matrices_takes_half_the_memory() -> None:
    model = LanguageModel(Model(width=64, layers=2, heads=2), 50)
    before = sum(module.weight.nbytes for module in model.modules() if isinstance(module, Product))
    learned = parameters(model)
    model.round_matrices()
    assert not any(isinstance(module, Product) for module in model.modules())
    after = sum(module.weight.nbytes for module in model.modules() if isinstance(module, Rounded))
    assert after * 2 == before
    assert parameters(model) == learned
