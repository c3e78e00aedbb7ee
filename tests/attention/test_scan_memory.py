"""On a GPU a span is as long as memory allows: counted with fake tensors, which have shapes and no values."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode

from lmlong import recipe
from lmlong.attention.device_policy import GPU_POLICY
from lmlong.attention.recurrence import Recurrence
from lmlong.attention.registry import CAUSAL
from lmlong.attention.scan import Scan, ScanInputs, Span, span_tokens
from lmlong.bench.timer import Allocations

HEADS, HEAD_DIM, TOKENS = 12, 64, 65536
"""A layer of the recipe `medium` and the longest text that it reads as one span."""

KINDS: dict[str, dict[str, object]] = {
    "linear": {"kind": "linear"},
    "channel": {"kind": "linear", "decay": "channel"},
    "FAVOR+": {"kind": "linear", "feature_map": "favor"},
    "no decay": {"kind": "linear", "decay": "none"},
    "delta": {"kind": "delta"},
}


def layer(options: dict[str, object], fakes: FakeTensorMode) -> Recurrence[Any]:
    """Return an attention with fake parameters; random features are drawn before."""
    attention = CAUSAL[options["kind"]](HEADS, HEAD_DIM, HEAD_DIM, recipe.Attention(**options))  # type: ignore[index, arg-type]
    assert isinstance(attention, Recurrence)
    attention.use_kernel("torch")
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


@pytest.mark.parametrize("kind", KINDS)
def test_64k_tokens_are_one_span_within_its_memory(kind: str) -> None:
    fakes = FakeTensorMode()
    attention = layer(KINDS[kind], fakes)
    with fakes:
        x, state = inputs(attention, TOKENS, 1, torch.bfloat16)
        assert tokens_of_span(attention, x, state) >= TOKENS
        leaves = [t.requires_grad_() for t in (*x, state) if t is not None and t.is_floating_point()]
        weights = list(attention.feature_map.parameters())
        with Allocations() as forward:
            y, after, _ = Scan.apply(attention.kernel, attention.feature_map, GPU_POLICY, True, state, *x, *weights)
        dresults = torch.empty_like(y), torch.empty_like(after)
        with Allocations() as backward:
            grads = torch.autograd.grad((y, after), [*leaves, *weights], dresults)
        assert GPU_POLICY.span_bytes is not None and len(grads) == len(leaves) + len(weights)
        temporary = (memory.peak - memory.now for memory in (forward, backward))  # besides results
        assert max(temporary) < GPU_POLICY.span_bytes


def test_spans_are_shorter_with_more_rows_and_more_features() -> None:
    fakes = FakeTensorMode()
    attention = layer(KINDS["linear"], fakes)
    wide = layer({"kind": "linear", "feature_map": "taylor", "taylor": recipe.Taylor(width=None)}, fakes)
    with fakes:
        one, two = (tokens_of_span(attention, *inputs(attention, TOKENS, batch, torch.bfloat16)) for batch in (1, 2))
        assert 2 * two <= one and tokens_of_span(wide, *inputs(wide, TOKENS, 1, torch.bfloat16)) < one / 20
