"""Keys and values cached in blocks, in their own format or in bfloat16: every token attends to them as they are cached,
also within a piece."""

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from lmlong.attention import laws
from lmlong.attention.base import CausalAttention, state_tensors
from lmlong.attention.softmax import state as softmax
from lmlong.attention.softmax.layer import SoftmaxAttention
from lmlong.attention.window.layer import WindowAttention
from lmlong.testing import random_text

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
    return ATTENTIONS[request.param]()


def as_cached(x: Tensor, cache: torch.dtype | None) -> Tensor:
    return x if cache is None else x.to(cache).to(x.dtype)


def dtypes(state: object) -> set[torch.dtype]:
    return {x.dtype for x in state_tensors(state) if x.is_floating_point()}


@pytest.mark.parametrize("cache", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("starts", [False, True], ids=["one document", "documents"])
def test_all_ways_of_reading_attend_to_the_same_cached_keys(
    attention: CausalAttention, starts: bool, cache: torch.dtype | None
) -> None:
    attention.cache_dtype = cache
    q, k, v, marks = text = random_text(attention, TIME, torch.float64, starts=None if starts else False)
    subject = laws.of_attention(attention, q)
    if starts:  # decoding without document starts drops what no row attends to any more
        subject = subject._replace(step=subject.forward)
    y, after = subject.forward(text, subject.init_state(2))
    assert_close(y, attention.reference(q, as_cached(k, cache), as_cached(v, cache), marks), rtol=1e-9, atol=1e-12)
    assert dtypes(after) == {cache or torch.float64}
    assert laws.steps_equal_forward(subject, text) < 1e-12
    assert laws.cuts_change_nothing(subject, text, [7, 8, 9, 16, 33]) < 1e-12
    with torch.no_grad():
        assert laws.parts_equal_forward(attention, text, text, [7, 16]) < 1e-12


@pytest.mark.parametrize(
    ("cache", "new", "kept"),
    [
        (torch.bfloat16, torch.float32, torch.bfloat16),
        (torch.float32, torch.bfloat16, torch.bfloat16),  # as under autocast, whose keys are already rounded
        (torch.float32, torch.float32, torch.float32),
    ],
)
def test_a_cache_never_gets_wider_than_its_keys(
    attention: CausalAttention, cache: torch.dtype, new: torch.dtype, kept: torch.dtype
) -> None:
    attention.cache_dtype = cache
    text = random_text(attention, TIME, new, starts=False)
    subject = laws.of_attention(attention, text[0])
    y, after = subject.forward(text, subject.init_state(2))
    assert y.dtype == new and dtypes(after) == {kept}


def test_settled_tokens_are_not_copied_for_each_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(softmax, "BLOCK", 8)
    attention = SoftmaxAttention(2, 4, 4)
    one = torch.randn(1, 2, 1, 4)
    state, addresses = attention.init_state(1, torch.device("cpu"), torch.float32), []
    for _ in range(30):
        _, state = attention(one, one, one, state)
        addresses.append(state.settled.k.data_ptr())
        assert state.settled.k.shape[2] % 8 == 0 and state.recent.k.shape[2] <= 8
    assert len(set(addresses)) == 4  # nothing, then three blocks
