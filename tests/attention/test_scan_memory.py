"""On a GPU a span is as long as memory allows: counted with fake tensors, which have shapes and no values."""

import copy
from typing import Any

import pytest
import torch
from models import kinds
from torch import Tensor
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode

from lmlong import recipe
from lmlong.attention.device_policy import GPU_POLICY, use_policy
from lmlong.attention.recurrence import Recurrence
from lmlong.attention.registry import CAUSAL
from lmlong.attention.scan import Scan, ScanInputs, Span, span_tokens
from lmlong.model.allocations import Allocations

HEADS, HEAD_DIM, TOKENS = 12, 64, 65536
"""A layer of the recipe `medium` and the longest text that it reads as one span."""

KINDS = kinds(1)


def layer(options: dict[str, object], fakes: FakeTensorMode) -> Recurrence[Any]:
    """Return an attention with fake parameters; random features are drawn before."""
    attention = CAUSAL[options["kind"]](HEADS, HEAD_DIM, HEAD_DIM, recipe.Attention(**options))  # type: ignore[index, arg-type]
    assert isinstance(attention, Recurrence)
    attention.use_kernel("torch")
    use_policy(attention, GPU_POLICY)
    with FakeCopyMode(fakes):
        return copy.deepcopy(attention)


def inputs(attention: Recurrence[Any], tokens: int, batch: int, dtype: torch.dtype) -> tuple[ScanInputs, Tensor]:
    """Return inputs with the layout of a model, and the state before them."""
    q, k, v = (torch.empty(batch, tokens, HEADS, HEAD_DIM, dtype=dtype).transpose(1, 2) for _ in range(3))
    gates = dict.fromkeys(attention.inputs, torch.empty(batch, HEADS, tokens))
    if attention.by_channel:
        gates["log_decay"] = torch.empty(batch, HEADS, tokens, attention.feature_map.features)
    state = attention.pack(attention.init_state(batch, q.device, dtype))
    return ScanInputs(q, k, v, torch.zeros(batch, tokens, dtype=torch.bool), **gates), state


def tokens_of_span(attention: Recurrence[Any], x: ScanInputs, state: Tensor) -> int:
    return span_tokens(x.v, GPU_POLICY, attention.kernel.token_bytes(Span(*x, y=x.v), state))


@pytest.mark.parametrize("kind", ["linear", "channel", "favor", "no decay", "delta"])
def test_64k_tokens_are_one_span_within_its_memory(kind: str) -> None:
    fakes = FakeTensorMode()
    attention = layer(KINDS[kind], fakes)
    with fakes:
        x, state = inputs(attention, TOKENS, 1, torch.bfloat16)
        assert tokens_of_span(attention, x, state) >= TOKENS
        leaves = [t.requires_grad_() for t in (*x, state) if t is not None and t.is_floating_point()]
        leaves += attention.feature_map.parameters()
        with Allocations() as forward:
            y, after, _ = Scan.apply(*attention.scan_arguments(state, x))
        assert_within_the_memory_of_a_span(1, forward, [y, after], leaves)


@pytest.mark.parametrize("kind", ["linear", "channel", "delta", pytest.param("favor", marks=pytest.mark.slow)])
def test_the_effect_of_64k_tokens(kind: str) -> None:
    """Autograd keeps only the inputs. The delta rule also has outputs, which are not used, and their gradients."""
    fakes = FakeTensorMode()
    attention = layer(KINDS[kind], fakes)
    with fakes:
        x, _ = inputs(attention, TOKENS, 1, torch.bfloat16)
        tensors = {name: each for name, each in x._asdict().items() if name in attention.inputs}
        leaves = [each.requires_grad_() for each in (x.k, x.v, *tensors.values())]
        with Allocations() as forward:
            effect = attention.effect(x.k, x.v, x.document_starts, tensors)
        assert forward.now < 3 * sum(each.nbytes for each in effect)  # FAVOR+ has the effects of two spans
        recorded = [each for each in effect if each.requires_grad]
        assert_within_the_memory_of_a_span(1.4 if kind == "delta" else 1, forward, recorded, leaves)


def assert_within_the_memory_of_a_span(
    times: float, forward: Allocations, results: list[Tensor], leaves: list[Tensor]
) -> None:
    """Both passes need no more memory besides their results."""
    slopes = [torch.empty_like(each) for each in results]
    with Allocations() as backward:
        grads = torch.autograd.grad(results, leaves, slopes)
    assert len(grads) == len(leaves) and GPU_POLICY.span_bytes is not None
    assert max(memory.peak - memory.now for memory in (forward, backward)) < times * GPU_POLICY.span_bytes


def test_spans_are_shorter_with_more_rows_and_more_features() -> None:
    fakes = FakeTensorMode()
    attention = layer(KINDS["linear"], fakes)
    wide = layer({"kind": "linear", "feature_map": "taylor", "taylor": recipe.Taylor(width=None)}, fakes)
    with fakes:
        one, two = (tokens_of_span(attention, *inputs(attention, TOKENS, batch, torch.bfloat16)) for batch in (1, 2))
        assert 2 * two <= one and tokens_of_span(wide, *inputs(wide, TOKENS, 1, torch.bfloat16)) < one / 20
