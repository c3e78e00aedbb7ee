"""What attentions declare that they need for each token reaches them, however a text is cut, batched or packed."""

from typing import Any, NamedTuple

import pytest
import torch
from model.test_laws import VOCABULARY, check_laws, subject, text
from models import stirred
from plugins.two_gates import TwoGates
from torch import Tensor
from torch.testing import assert_close

from lmlong import recipe
from lmlong.attention import laws
from lmlong.attention.base import CausalAttention
from lmlong.attention.inputs import Gate, GateProjection, LastTokens
from lmlong.attention.registry import CAUSAL
from lmlong.errors import UsageError
from lmlong.evaluation.law_check import NO_EFFECT, plugin_report
from lmlong.model.language_model import LanguageModel
from lmlong.model.segments import text_loss
from lmlong.testing import check_attention


class Nothing(NamedTuple):
    """A state for attentions that remember nothing."""


class TokenScaled(CausalAttention[Nothing]):
    """y_t = v_t, times a number made from the last three tokens."""

    def __init__(self, heads: int, head_dim: int, value_dim: int):
        super().__init__()
        self.heads, self.head_dim, self.value_dim = heads, head_dim, value_dim
        self.inputs = {"scale": LastTokens(3, self.scale)}

    def scale(self, tokens: Tensor) -> Tensor:
        number = (tokens * torch.tensor([1, 3, 9])).sum(-1) % 7
        return number[:, None].expand(-1, self.heads, -1)

    def init_state(self, batch: int, device: torch.device, dtype: torch.dtype) -> Nothing:
        return Nothing()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, state: Nothing, *rest: Any) -> tuple[Tensor, Nothing]:
        return self.reference(q, k, v, *rest), state

    def reference(self, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
        _, inputs = rest
        return v * inputs["scale"][..., None]


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> LanguageModel:
    """A model of both attentions in turn, with weights that let gates open and close."""
    monkeypatch.setitem(CAUSAL, "linear", lambda *sizes_and_options: TwoGates(*sizes_and_options[:3]))
    monkeypatch.setitem(CAUSAL, "window", lambda *sizes_and_options: TokenScaled(*sizes_and_options[:3]))
    options = recipe.Model(width=24, layers=3, heads=2, attention=recipe.Attention(kind=["linear", "window"]))
    torch.manual_seed(0)
    return stirred(LanguageModel(options, VOCABULARY), 0.3)


def test_a_recurrence_with_gates_of_its_own_keeps_the_laws() -> None:
    report = check_attention(TwoGates)
    assert report.kept and not report.divides
    assert NO_EFFECT in plugin_report([report]).text()


def test_gates_have_the_shapes_and_starts_that_were_declared() -> None:
    for declared in TwoGates(3, 8, 5).inputs.values():
        assert isinstance(declared, Gate)
        gates = GateProjection(24, declared)(torch.randn(2, 5, 24))
        assert gates.shape == (2, 3, 5, *declared.start.shape[1:])
        start = declared.activate(declared.start)
        assert_close(gates, start.unsqueeze(1).expand(gates.shape))


def test_a_gate_in_bfloat16_is_rounded_only_before_its_bias() -> None:
    torch.manual_seed(0)
    gate = GateProjection(24, Gate("forget_gate", "log_sigmoid", torch.full((3,), 9.0)))
    with torch.no_grad():
        gate.weight.normal_(0, 0.1)
    x = torch.randn(2, 5, 24).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        rounded = gate(x)
    exact = gate.double()(x.double())
    assert rounded.dtype == torch.float32
    assert ((rounded / exact - 1).abs() < 0.02).all()  # 9 in bfloat16 is a multiple of 1/16, and the gate 6 % off


def test_a_model_of_such_attentions_keeps_the_laws(model: LanguageModel) -> None:
    model.double()
    check_laws(model, text())
    x, begins = text(), [0, 1, 2, 20]
    starts = torch.zeros_like(x[1]).index_fill(1, torch.tensor(begins), True)  # type: ignore[arg-type]
    assert laws.documents_are_independent(subject(model), (x[0], starts), (x[0], None), begins) < 1e-10


def test_segments_hand_on_the_last_tokens(model: LanguageModel) -> None:
    tokens, starts = text()
    assert tokens is not None
    losses, gradients = [], []
    for segment in (None, 7):
        loss, state = text_loss(model, tokens, tokens.roll(-1, 1), starts, segment=segment)
        losses.append(loss)
        gradients.append(torch.autograd.grad(loss, list(model.parameters())))
        assert state.last_tokens is not None and torch.equal(state.last_tokens, tokens[:, -2:])
    assert_close(*losses)
    for one, other in zip(*gradients, strict=True):
        assert_close(one, other, rtol=1e-3, atol=1e-3 * float(one.abs().max()))


def test_a_downsampled_layer_has_no_tokens_to_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CAUSAL, "window", lambda *sizes_and_options: TokenScaled(*sizes_and_options[:3]))
    options = recipe.Model(
        width=24, layers=3, heads=2, attention=recipe.Attention(kind="window"), downsample=recipe.Downsample()
    )
    with pytest.raises(UsageError, match=r"model\.downsample: the attention of layer 2 reads tokens"):
        LanguageModel(options, VOCABULARY)
