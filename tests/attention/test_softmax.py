"""The baseline's cache: tokens that have settled are seen as before."""

import pytest
import torch

from lmlong.attention import laws
from lmlong.attention.softmax import state as softmax
from lmlong.attention.softmax.layer import SoftmaxAttention

TIME = 50


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(softmax, "BLOCK", 8)


@pytest.mark.usefixtures("small_blocks")
def test_the_laws_hold_across_the_borders_of_blocks() -> None:
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 2, TIME, 4, generator=draw, dtype=torch.float64) for _ in range(3))
    starts = torch.rand(2, TIME, generator=draw) < 0.05
    attention = SoftmaxAttention(2, 4, 4)
    for x in ((q, k, v, None), (q, k, v, starts)):
        subject = laws.of_attention(attention, q)
        if x[3] is not None:  # decoding without document starts drops what no row attends to any more
            subject = subject._replace(step=subject.forward)
        assert laws.steps_equal_forward(subject, x) < 1e-12
        assert laws.cuts_change_nothing(subject, x, [7, 8, 9, 16, 33]) < 1e-12


@pytest.mark.usefixtures("small_blocks")
def test_settled_tokens_are_not_copied_for_each_new_one() -> None:
    attention = SoftmaxAttention(2, 4, 4)
    one = torch.randn(1, 2, 1, 4)
    state, places = attention.init_state(1, torch.device("cpu"), torch.float32), []
    for _ in range(30):
        _, state = attention(one, one, one, state)
        places.append(state.settled.k.data_ptr())
        assert state.settled.k.shape[2] % 8 == 0 and state.recent.k.shape[2] <= 8
    assert len(set(places)) == 4  # nothing, then three blocks
