"""A model computes the same by the policy of a GPU as by the policy of a CPU."""

import pytest
import torch
from machine import needs_compiler
from torch import Tensor

from lmlong import recipe
from lmlong.attention import laws
from lmlong.attention.device_policy import CPU_POLICY, GPU_POLICY, DevicePolicy, use_policy
from lmlong.model.language_model import LanguageModel

VOCABULARY, TOKENS = 50, 700

KINDS: dict[str, dict[str, object]] = {
    "linear": {"kind": "linear"},
    "channel": {"kind": "linear", "decay": "channel"},
    "no decay": {"kind": "linear", "decay": "none"},
    "favor": {"kind": "linear", "feature_map": "favor"},
    "delta": {"kind": "delta"},
    "window": {"kind": "window", "window": 70},
    "parallel window": {"kind": "linear", "parallel_window": 70},
    "softmax": {"kind": "softmax"},
    "ngram": {"kind": "ngram"},
}


def by_policy(model: LanguageModel, policy: DevicePolicy, starts: Tensor | None) -> dict[str, Tensor]:
    """Return the loss of a text, that of each target, the state after, and all gradients."""
    tokens = torch.randint(VOCABULARY, (2, TOKENS + 1), generator=torch.Generator().manual_seed(1))
    text, targets = tokens[:, :-1], tokens[:, 1:].clone()
    targets[0, 5:9] = -100
    use_policy(model, policy)
    loss, state = model.loss(text, targets, starts)
    grads = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    nll, _ = model.token_nll(text, targets, starts)
    named = {name: grad for (name, _), grad in zip(model.named_parameters(), grads, strict=True) if grad is not None}
    states = {f"state {n}": x for n, x in enumerate(laws.state_tensors(state)) if x.is_floating_point()}
    return {"loss": loss.detach(), "of each": nll, **states, **named}


def build(kind: str, checkpointing: bool = False, **shape: object) -> LanguageModel:
    torch.manual_seed(0)
    attention = recipe.Attention(**KINDS[kind])  # type: ignore[arg-type]
    options = recipe.Model(width=32, layers=2, heads=2, attention=attention, **shape)  # type: ignore[arg-type]
    model = LanguageModel(options, VOCABULARY, checkpointing).double()
    model.use_kernel("torch")
    model.set_state_dtype(torch.float64)
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    return model


def starting_at(starts: list[int]) -> Tensor:
    """Return the starts of documents in the first of two rows."""
    document_starts = torch.zeros(2, TOKENS, dtype=torch.bool)
    document_starts[0, starts] = True
    return document_starts


def assert_same(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, value in expected.items():
        assert laws.error(got[name], value) < 1e-9, name


@pytest.mark.parametrize("starts", [None, [0, 64, 65, 300]], ids=["one document", "documents"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_policy_of_a_gpu_gives_the_same(kind: str, starts: list[int] | None) -> None:
    model, document_starts = build(kind), None if starts is None else starting_at(starts)
    expected, got = (by_policy(model, policy, document_starts) for policy in (CPU_POLICY, GPU_POLICY))
    assert_same(got, expected)


@pytest.mark.parametrize(
    ("kind", "compiles"),
    [("softmax", False), ("window", False), pytest.param("softmax", True, marks=[pytest.mark.slow, needs_compiler])],
)
def test_lists_of_blocks_in_a_compiled_model_that_recomputes_activations(kind: str, compiles: bool) -> None:
    shape, document_starts = {"kv_heads": 1}, starting_at([3, 300])
    expected = by_policy(build(kind, **shape), CPU_POLICY, document_starts)
    model = build(kind, checkpointing=True, **shape)
    if compiles:
        torch._dynamo.reset()
        model.compile_blocks()
    assert_same(by_policy(model, GPU_POLICY, document_starts), expected)
