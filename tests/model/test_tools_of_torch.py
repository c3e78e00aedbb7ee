"""The model in the hands of torch's own tools: hooks, FLOP counter, torch.compile."""

import pytest
import torch
from machine import needs_compiler
from models import predict, stirred

from lmlong import recipe
from lmlong.attention import laws
from lmlong.model.language_model import LanguageModel

OPTIONS = {
    "favor": recipe.Attention(kind="linear", feature_map="favor"),
    "window": recipe.Attention(kind="window", window=16),
    "all": recipe.Attention(kind=["linear", "window", "softmax"], window=16),
}


def build(kind: str) -> LanguageModel:
    return stirred(LanguageModel(recipe.Model(width=16, layers=3, heads=2, attention=OPTIONS[kind]), 50), 0.3)


@pytest.mark.parametrize("kind", ["favor", "all"])
def test_a_forward_hook_sees_every_block_and_attention(kind: str) -> None:
    model, seen = build(kind), []
    for name, module in model.named_modules():
        module.register_forward_hook(lambda _, inputs, output, name=name: seen.append(name))
    predict(model, torch.randint(50, (1, 40)))
    # a list has no forward, and a feature map has one for queries and one for keys
    without = {name for name, _ in model.named_modules() if name == "blocks" or name.endswith("feature_map")}
    assert set(seen) == {name for name, _ in model.named_modules()} - without


@pytest.mark.slow
@needs_compiler
@pytest.mark.filterwarnings("ignore")
def test_torch_compile_changes_nothing() -> None:
    """As anyone would call it, on a model of all kinds of attention: values, states and gradients."""
    model, tokens = build("all"), torch.randint(50, (2, 70), generator=torch.Generator().manual_seed(0))
    upstream = torch.randn(2, 70, 50, generator=torch.Generator().manual_seed(1))
    weights = list(model.parameters())
    plain, state = model(tokens)
    compiled, compiled_state = torch.compile(model)(tokens)
    assert laws.error(compiled, plain) < 1e-5
    for mine, truth in zip(laws.state_tensors(compiled_state), laws.state_tensors(state), strict=True):
        assert laws.error(mine, truth) < 1e-5
    grads = (torch.autograd.grad(y, weights, upstream) for y in (compiled, plain))
    for mine, truth in zip(*grads, strict=True):
        assert laws.error(mine, truth) < 1e-4
