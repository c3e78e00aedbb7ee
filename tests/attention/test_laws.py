"""The laws of causal attention, for every attention in the registry."""

from itertools import product
from typing import Any

import pytest
import torch
from attention.cases import (
    FORMS,
    HEAD_DIM,
    HEADS,
    VALUE_DIM,
    both_types,
    build,
    each_type,
    every_form,
    name,
)
from grids import every_nth, thinned
from torch import Tensor

from lmlong import recipe
from lmlong.attention import laws
from lmlong.attention.base import CausalAttention, state_tensors
from lmlong.attention.chunks import CHUNK_SIZE
from lmlong.attention.device_policy import CPU_POLICY, GPU_POLICY, DevicePolicy, use_policy
from lmlong.attention.laws import Text
from lmlong.attention.recurrence import Recurrence
from lmlong.model.state import rebuild_state
from lmlong.testing import EXACT, cast, check_attention, distance, in_two_parts, random_text, with_gradients

ROUNDING = {
    torch.float64: 2.5e-11,
    torch.float32: 16 * torch.finfo(torch.float32).eps,
    torch.bfloat16: torch.finfo(torch.bfloat16).eps,
}
"""Rounding errors by dtype: the definition itself may be more exact by chance."""

LENGTHS = [1, CHUNK_SIZE - 1, CHUNK_SIZE, CHUNK_SIZE + 1, 211]
lengths = pytest.mark.parametrize("time", LENGTHS)


BY_BLOCKS = {
    (form.kind, form.window_sink): form for form in FORMS if form.kind in ("softmax", "window") or form.parallel_window
}.values()
"""A form of each kind that a GPU computes by blocks of keys."""


@pytest.mark.parametrize(
    ("form", "policy"),
    [*product(FORMS, [CPU_POLICY]), *product(BY_BLOCKS, [GPU_POLICY])],
    ids=lambda value: name(value) if isinstance(value, recipe.Attention) else "cpu" if value is CPU_POLICY else "gpu",
)
def test_every_form_keeps_the_laws(form: recipe.Attention, policy: DevicePolicy) -> None:
    attention = build(form)
    use_policy(attention, policy)
    assert check_attention(attention).kept


@every_nth(3, thinned(every_form, both_types, lengths))
def test_ways_of_reading_texts_of_other_lengths_agree(form: recipe.Attention, dtype: torch.dtype, time: int) -> None:
    attention = build(form)
    begins = sorted({begin for begin in (0, 1, 30, 64, 150, 209) if begin < time})
    starts = torch.zeros(3, time, dtype=torch.bool)
    starts[:, begins] = True
    text, other, packed = (
        random_text(attention, time, dtype, 3, seed, starts=marked)
        for seed, marked in ((0, None), (1, None), (0, starts))
    )
    cuts = sorted({cut for cut in (1, time // 3, 63, 64, 65, 128, time - 1) if cut < time})
    case = laws.Case(laws.of_attention(attention, text[0]), text, other, packed, begins, cuts, 3)
    for number in laws.SAME_TEXT:
        assert laws.measure(number, case) <= (0.0 if number in laws.EXACT else EXACT[dtype]), laws.LAWS[number]


@thinned(
    each_type,
    lengths,
    every_nth(
        3,
        pytest.mark.parametrize(
            ("form", "backend"),
            [
                *((form, "native") for form in FORMS),
                *((form, "torch") for form in FORMS if build(form).kernels),
                *((form, "torch for GPUs") for form in FORMS),
            ],
            ids=lambda value: value if isinstance(value, str) else name(value),
        ),
    ),
)
def test_values_and_gradients_match_the_definition(
    form: recipe.Attention, dtype: torch.dtype, time: int, backend: str
) -> None:
    attention = build(form)
    attention.use_kernel(backend.split()[0])
    use_policy(attention, GPU_POLICY if backend == "torch for GPUs" else CPU_POLICY)
    assert_exact(attention, random_text(attention, time, torch.float64), dtype, ROUNDING[dtype])


def assert_exact(attention: CausalAttention, x: Text, dtype: torch.dtype, rounding: float) -> None:
    """Outputs and gradients have up to four times the error of the definition in the same dtype, or of `rounding`. The
    text is read in two parts, so that gradients flow through the state."""
    assert x[2] is not None
    upstream = torch.randn(x[2].shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    exact = with_gradients(lambda y: laws.reference(attention, y), x, upstream)
    formula = with_gradients(lambda y: laws.reference(attention, y), cast(x, dtype), upstream)
    subject = laws.of_attention(attention, x[2].to(dtype))
    measured = with_gradients(lambda y: in_two_parts(subject, y), cast(x, dtype), upstream)
    for mine, other, truth in zip(measured, formula, exact, strict=True):
        assert distance(mine, truth, upstream) < 4 * max(distance(other, truth, upstream), rounding)


@every_form
def test_recipes_know_the_facts_of_an_attention(form: recipe.Attention) -> None:
    """Whether it has keys, and whether its state grows. The state holds no more memory than declared."""
    attention, model = build(form), recipe.Model(attention=form)
    known = [recipe.ATTENTION_KINDS[kind] for kind in model.attention.kind_names]
    assert [(attention.state_growth, attention.has_keys)] == [(info.state_growth, info.has_keys) for info in known]
    x = random_text(attention, 211, torch.float32)
    _, state = laws.of_attention(attention, x[0]).forward(
        x, attention.init_state(2, torch.device("cpu"), torch.float32)
    )
    for tensor in state_tensors(state):  # a view of something larger would hold all of it
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


@thinned(every_form, pytest.mark.parametrize(("batch", "time"), [(2, 0), (0, 5), (0, 1), (0, 0)]))
def test_no_tokens_or_no_rows(form: recipe.Attention, batch: int, time: int) -> None:
    attention = build(form)
    subject = laws.of_attention(attention, torch.zeros(()))
    _, state = subject.forward(x := random_text(attention, 30, torch.float32), subject.init_state(2))
    y, after = subject.forward(
        tuple(None if t is None else t[:batch] for t in laws.cut(x, 0, time)), state_rows(state, batch)
    )
    assert y.shape == (batch, HEADS, time, VALUE_DIM)
    if time == 0:
        assert all(map(torch.equal, state_tensors(after), state_tensors(state_rows(state, batch))))


def state_rows(state: Any, count: int) -> Any:
    return rebuild_state(state, iter([x[:count] for x in state_tensors(state)]))


@every_nth(3, thinned(every_form, pytest.mark.parametrize("scale", [1e-4, 1e-2, 1.0, 1e2, 1e4])))
def test_values_and_gradients_at_any_scale(form: recipe.Attention, scale: float) -> None:
    attention = build(form)
    scale = min(scale, attention.largest_scale)
    q, k, v, starts, *others = random_text(attention, 300, torch.float64)
    x = (q * scale, k * scale, v * scale, starts, *others)
    # torch's fused softmax computes exp to about 20 bits; and where a window shows one key alone, whose gradient is 0,
    # it leaves what rounding leaves of two equal sums over v, each of which some processors add up in its own order
    rounding = 2.5e-6 * (max(scale, 1.0) if form.kind == "window" else 1.0)
    assert_exact(attention, x, torch.float32, rounding)


@every_nth(
    8, pytest.mark.parametrize("form", [form for form in FORMS if form.kind not in ("softmax", "window")], ids=name)
)
def test_a_hundred_thousand_tokens(form: recipe.Attention) -> None:
    """In float32, the end of a long text is as in float64."""
    attention = build(form)
    x = random_text(attention, 100_000, torch.float32, batch=1, starts=False)
    precise = cast(x, torch.float64)
    fast, exact = (
        laws.of_attention(attention, t[2]).forward(t, attention.init_state(1, t[2].device, t[2].dtype))[0][:, :, -1000:]
        for t in (x, precise)
    )
    assert laws.error(fast, exact) < 1e-4


@every_nth(4, every_form)
def test_autocast_changes_nothing(form: recipe.Attention) -> None:
    """Without protection it would round the sums between chunks to bfloat16."""
    attention = build(form)
    x = random_text(attention, 211, torch.bfloat16)
    plain = outputs_state_and_gradients(attention, x)
    with torch.autocast("cpu", torch.bfloat16):
        cast = outputs_state_and_gradients(attention, x)
    for mine, truth in zip(cast, plain, strict=True):
        assert mine.dtype == truth.dtype and torch.equal(mine, truth)


def outputs_state_and_gradients(attention: CausalAttention, x: Text) -> list[Tensor]:
    """Of a text, and of one token after it; gradients of recurrences, whose backward
    pass is our own."""
    subject = laws.of_attention(attention, torch.zeros((), dtype=torch.bfloat16))
    leaves = tuple(t if t is None else t.detach().requires_grad_(t.is_floating_point()) for t in x)
    y, state = subject.forward(leaves, subject.init_state(2))
    after, _ = subject.step(laws.cut(leaves, 0, 1), state)
    results = [y, *state_tensors(state)]
    if not isinstance(attention, Recurrence):
        return [after, *results]
    inputs = [t for t in leaves if t is not None and t.requires_grad]
    return [after, *results, *torch.autograd.grad([t.float().sum() for t in results], inputs, materialize_grads=True)]


def test_sums_stay_in_float32_when_inputs_are_bfloat16() -> None:
    """A running sum of keys kept in bfloat16 would stop growing near 256 and read far below the truth."""
    attention = build(recipe.Attention(kind="linear", feature_map="elu", decay="none"))
    k, v = (torch.zeros(1, HEADS, 4000, size, dtype=torch.bfloat16) for size in (HEAD_DIM, VALUE_DIM))
    _, state = attention(k, k, v, attention.init_state(1, k.device, k.dtype))
    assert ((state.z - 4000).abs() < 1).all()  # features of zeros are ones and the floor
