"""Keys and values cached in bfloat16: every token attends to them as they are cached, also within a piece."""

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from lmlong.attention import laws
from lmlong.attention.base import CausalAttention, state_tensors
from lmlong.attention.softmax import state as softmax
from lmlong.attention.softmax.layer import SoftmaxAttention
from lmlong.attention.window.layer import WindowAttention

TIME = 50


def grouped_softmax() -> SoftmaxAttention:
    attention = SoftmaxAttention(4, 6, 5)
    assert attention.group_heads(2)
    return attention


ATTENTIONS = {
    "softmax": grouped_softmax,
    "window": lambda: WindowAttention(2, 6, 5, 9),
    "window of one": lambda: WindowAttention(2, 6, 5, 1),
}


@pytest.fixture(params=ATTENTIONS)
def attention(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> CausalAttention:
    monkeypatch.setattr(softmax, "BLOCK", 8)
    attention = ATTENTIONS[request.param]()
    attention.cache_dtype = torch.bfloat16
    return attention


def draw(attention: CausalAttention, dtype: torch.dtype = torch.float64) -> laws.Text:
    generator = torch.Generator().manual_seed(0)
    sizes = (
        (attention.heads, attention.head_dim),
        (attention.kv_heads, attention.head_dim),
        (attention.kv_heads, attention.value_dim),
    )
    return tuple(
        torch.randn(2, heads, TIME, size, generator=generator, dtype=torch.float64).to(dtype) for heads, size in sizes
    )


def rounded(x: Tensor) -> Tensor:
    return x.bfloat16().to(x.dtype)


@pytest.mark.parametrize("starts", [False, True])
def test_all_ways_of_reading_attend_to_the_same_rounded_keys(attention: CausalAttention, starts: bool) -> None:
    q, k, v = draw(attention)
    marks = torch.rand(2, TIME, generator=torch.Generator().manual_seed(1)) < 0.05 if starts else None
    subject, text = laws.of_attention(attention, q), (q, k, v, marks)
    if starts:  # decoding without document starts drops what no row attends to any more
        subject = subject._replace(step=subject.forward)
    y, after = subject.forward(text, subject.init_state(2))
    assert_close(y, attention.reference(q, rounded(k), rounded(v), marks), rtol=1e-9, atol=1e-12)
    assert {x.dtype for x in state_tensors(after) if x.is_floating_point()} == {torch.bfloat16}
    assert laws.steps_equal_forward(subject, text) < 1e-12
    assert laws.cuts_change_nothing(subject, text, [7, 8, 9, 16, 33]) < 1e-12
    with torch.no_grad():
        assert laws.parts_equal_forward(attention, text, text, [7, 16]) < 1e-12


def test_only_rounding_separates_it_from_a_cache_in_float32(attention: CausalAttention) -> None:
    text = (*draw(attention, torch.float32), None)
    subject = laws.of_attention(attention, text[0])
    y, _ = subject.forward(text, subject.init_state(2))
    attention.cache_dtype = None
    exact, after = subject.forward(text, subject.init_state(2))
    assert {x.dtype for x in state_tensors(after) if x.is_floating_point()} == {torch.float32}
    assert 1e-4 < laws.error(y, exact) < 2**-7


def test_a_cache_never_gets_wider_or_loses_digits_for_narrower_keys(attention: CausalAttention) -> None:
    """As under autocast, whose keys are already rounded."""
    for cache, new, kept in (
        (torch.bfloat16, torch.float32, torch.bfloat16),
        (torch.float32, torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.float32, torch.float32),
    ):
        attention.cache_dtype = cache
        text = (*draw(attention, new), None)
        subject = laws.of_attention(attention, text[0])
        y, after = subject.forward(text, subject.init_state(2))
        assert y.dtype == new and {x.dtype for x in state_tensors(after) if x.is_floating_point()} == {kept}
