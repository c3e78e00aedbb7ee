"""Sinks made of the first token of a trained model."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from lmlong import recipe
from lmlong.attention.softmax.layer import SoftmaxAttention
from lmlong.model.language_model import LanguageModel
from lmlong.model.sinks import make_sinks
from tests.models import LIKE_LLAMA, stirred

WINDOW, VOCABULARY = 5, 30
SHAPES: list[dict[str, Any]] = [{"heads": 2}, {"heads": 4, "kv_heads": 2}, {"heads": 2, "positions": "none"}]


def made(attention: recipe.Attention, **shape: Any) -> LanguageModel:
    options = {"width": 16, "layers": 1, **LIKE_LLAMA, "convolution": 0, **shape}
    return stirred(LanguageModel(recipe.Model(attention=attention, **options), VOCABULARY), 0.3)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@torch.no_grad()
def test_a_sink_is_a_first_token_just_out_of_the_window(shape: dict[str, Any]) -> None:
    """Logits and outputs are linear in keys and values, so those of the mean are the mean over all first tokens."""
    old = made(recipe.Attention(kind="softmax"), **shape)
    new = made(recipe.Attention(kind="window", window=WINDOW, window_sink=True), **shape)
    new.load_state_dict(old.state_dict(), strict=False)
    make_sinks(new, {name for name, _ in new.named_parameters() if "sink" in name})
    tokens = torch.arange(VOCABULARY)[:, None].expand(-1, WINDOW + 1).clone()
    tokens[:, 1:] = torch.tensor([3, 1, 4, 1, 5])
    seen: dict[str, tuple[Tensor, ...]] = {}

    def see(module: Any, arguments: Any) -> None:
        seen[type(module).__name__] = arguments

    for model in (old, new):
        model.attentions[0].register_forward_pre_hook(see)
        model(tokens)
    q, k, v, *_ = seen[SoftmaxAttention.__name__]
    *_, inputs = seen["WindowAttention"]
    each = old.attentions[0].queries_per_key
    logits = (q[:, :, -1] * k[:, :, 0].repeat_interleave(each, dim=1)).sum(2) * q.shape[3] ** -0.5
    assert_close(inputs["window_sink"][0, :, -1], logits.mean(0), rtol=1e-4, atol=1e-5)
    (value,) = (part.sink_value for part in new.attention_parts)  # type: ignore[union-attr]
    assert_close(value.data, v[:, :, 0].mean(0))  # type: ignore[union-attr]


@pytest.mark.parametrize("attention", [{"kind": "window"}, {"kind": "linear", "parallel_window": WINDOW}], ids=str)
def test_trained_sinks_stay(attention: dict[str, Any]) -> None:
    model = made(recipe.Attention(window=WINDOW, window_sink=True, **attention), heads=2)
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    make_sinks(model, ())
    assert all(torch.equal(weight, before[name]) for name, weight in model.named_parameters())
    make_sinks(model, {"blocks.0.mixer.window_sink.weight"})
    changed = {name for name, weight in model.named_parameters() if not torch.equal(weight, before[name])}
    assert {
        name.split(".mixer.")[1].removeprefix("attention.window.").removeprefix("attention.") for name in changed
    } == {
        "window_sink.weight",
        "window_sink.bias",
        "sink_value",
    }
    assert model.training
