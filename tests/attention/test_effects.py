"""The effect of a part of a text on any state before it, with which parts are computed at once (law 12)."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from attention.cases import FORMS, build, name
from grids import every_nth, thinned
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from lmlong import recipe
from lmlong.attention import laws
from lmlong.attention.base import CausalAttention, state_tensors
from lmlong.attention.device_policy import CPU_POLICY, GPU_POLICY, DevicePolicy, use_policy
from lmlong.attention.scan import SPAN
from lmlong.attention.softmax.layer import SoftmaxAttention
from lmlong.attention.window.layer import WindowAttention
from lmlong.testing import random_text

TIME = 200
ALLOWED = {torch.float64: 1e-10, torch.float32: 2e-6, torch.bfloat16: 0.03}
DIVIDING = [form for form in FORMS if build(form).divides]

every_form = pytest.mark.parametrize("form", DIVIDING, ids=name)
policies = pytest.mark.parametrize("policy", [CPU_POLICY, GPU_POLICY], ids=["cpu", "gpu"])
partitions = pytest.mark.parametrize(
    "cuts",
    [[77], [1, 2, 3, 130, 199], range(25, TIME, 25), [*range(1, 50), *range(60, TIME, 10)]],
    ids=lambda cuts: f"{len(cuts) + 1}-parts",
)
EVERY_TOKEN = torch.zeros(2, TIME, dtype=torch.bool)
EVERY_TOKEN[0] = True
documents = pytest.mark.parametrize("starts", [False, None, EVERY_TOKEN], ids=["one", "several", "of one token"])


def law(attention: CausalAttention, cuts: Sequence[int], starts: Tensor | bool | None, dtype: torch.dtype) -> float:
    text, before = (
        random_text(attention, time, dtype, seed=time, starts=each) for time, each in ((TIME, starts), (40, None))
    )
    return laws.parts_equal_forward(attention, before, text, cuts)


@thinned(every_form, policies, partitions, documents, pytest.mark.parametrize("dtype", ALLOWED, ids=str))
def test_parts_read_at_once(
    form: recipe.Attention, policy: DevicePolicy, cuts: Sequence[int], starts: Tensor | bool | None, dtype: torch.dtype
) -> None:
    """Gradients are compared in float64. Of inputs in bfloat16, weights are rounded before their products as in the
    forward pass."""
    attention = build(form).to(torch.promote_types(dtype, torch.float32))
    use_policy(attention, policy)
    with torch.set_grad_enabled(dtype == torch.float64):
        assert law(attention, cuts, starts, dtype) < ALLOWED[dtype]


@pytest.mark.parametrize("policy", [CPU_POLICY, GPU_POLICY._replace(span_bytes=10**4)], ids=["cpu", "gpu"])
@pytest.mark.parametrize("decay", ["learned", "channel"])
def test_parts_of_several_spans(decay: Any, policy: DevicePolicy) -> None:
    attention = build(recipe.Attention(kind="linear", decay=decay)).double()
    use_policy(attention, policy)
    starts = torch.zeros(2, 6 * SPAN, dtype=torch.bool)
    starts[0, 2 * SPAN + 3] = True
    text, before = (
        random_text(attention, time, torch.float64, starts=each) for time, each in ((6 * SPAN, starts), (40, False))
    )
    assert laws.parts_equal_forward(attention, before, text, [3 * SPAN + 5]) < 1e-10


@pytest.mark.parametrize("attention", [SoftmaxAttention(4, 8, 5), WindowAttention(4, 8, 5, 70, sink=True)])
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_parts_of_grouped_heads(kv_heads: int, attention: CausalAttention) -> None:
    assert attention.group_heads(kv_heads)
    attention.double()
    for policy in (CPU_POLICY, GPU_POLICY):
        use_policy(attention, policy)
        assert law(attention, [1, 77, 150], None, torch.float64) < 1e-10


def effect_of(attention: CausalAttention, time: int) -> Any:
    _, *arguments = laws.arguments(attention, random_text(attention, time, torch.float32))
    return attention.effect(*arguments)


@every_nth(4, every_form)
def test_effects_of_any_length_have_one_shape(form: recipe.Attention) -> None:
    attention = build(form)
    short, longer = (attention.padded_effect(effect_of(attention, time), 30) for time in (1, 30))
    assert [x.shape for x in state_tensors(short)] == [x.shape for x in state_tensors(longer)]


WITH_STATE = [form for form in DIVIDING if form.kind != "convolution"]


@pytest.mark.parametrize("form", {(form.kind, form.parallel_window): form for form in WITH_STATE}.values(), ids=name)
def test_nothing_waits_for_a_value(form: recipe.Attention) -> None:
    """Tensors without values raise where a value is read."""
    attention = build(form)
    for part in attention.parts:
        part.use_kernel("torch")
    use_policy(attention, GPU_POLICY)
    _, k, v, starts, others = laws.arguments(attention, random_text(attention, 100, torch.float32))
    with FakeTensorMode(allow_non_fake_inputs=True) as fakes:
        k, v, starts = (fakes.from_tensor(x) for x in (k, v.requires_grad_(), starts))
        others = {name: fakes.from_tensor(x) for name, x in others.items()}
        state = attention.init_state(2, v.device, v.dtype)
        for _ in range(2):
            state = attention.after_effect(state, attention.effect(k, v, starts, others))
        torch.autograd.grad([x.sum() for x in state_tensors(state) if x.requires_grad], v)
