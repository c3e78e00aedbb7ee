"""A sequence trained segment by segment: the gradient of the whole, for every attention, at the memory of a part."""

import subprocess
import sys

import pytest
import torch
from attention.cases import FORMS, name
from grids import every_nth, thinned
from models import stirred
from torch import Tensor

from lmlong import recipe
from lmlong.attention import laws
from lmlong.errors import UsageError
from lmlong.model.language_model import LanguageModel
from lmlong.model.segments import text_loss

TIME = 300
CONSTANT = [form for form in FORMS if form.kind != "softmax"]
every_constant_form = pytest.mark.parametrize("form", CONSTANT, ids=name)


def build(form: recipe.Attention, dtype: torch.dtype, **options: object) -> LanguageModel:
    shape = recipe.Model(width=16, layers=2, heads=2, attention=form, **options)  # type: ignore[arg-type]
    return stirred(LanguageModel(shape, 50), 0.3).to(dtype)


def gradients(model: LanguageModel, segment: int | None, seed: int = 0) -> tuple[Tensor, list[Tensor]]:
    draw = torch.Generator().manual_seed(seed)
    tokens = torch.randint(50, (2, TIME), generator=draw)
    targets = tokens.roll(-1, 1).masked_fill(torch.rand(2, TIME, generator=draw) < 0.05, -100)
    starts = torch.rand(2, TIME, generator=draw) < 1 / 40
    nats, _ = text_loss(model, tokens, targets, starts, segment=segment)
    scored = (targets != -100).sum()
    return nats.detach(), list(torch.autograd.grad(nats / scored, list(model.parameters())))


@thinned(
    every_nth(3, every_constant_form),
    pytest.mark.parametrize("segment", [16, 50, 64, 299]),
    pytest.mark.parametrize(("dtype", "allowed"), [(torch.float64, 1e-10), (torch.float32, 1e-5)], ids=["64", "32"]),
)
def test_gradients_are_those_of_the_whole(
    form: recipe.Attention, segment: int, dtype: torch.dtype, allowed: float
) -> None:
    model = build(form, dtype)
    loss, whole = gradients(model, None)
    loss_of_parts, parts = gradients(model, segment)
    assert loss_of_parts == pytest.approx(float(loss), rel=allowed)
    largest = max(float(gradient.norm()) for gradient in whole)
    for mine, truth in zip(parts, whole, strict=True):
        # a gradient that is 0 in exact numbers, as of a gain that cancels, is only noise
        assert laws.error(mine, truth) < allowed or float((mine - truth).norm()) < allowed * 1e-2 * largest


@every_nth(6, every_constant_form)
def test_in_bfloat16_it_is_no_farther_from_the_truth_than_the_whole(form: recipe.Attention) -> None:
    model = build(form, torch.float32)
    _, truth = gradients(model, None)
    with torch.autocast("cpu", torch.bfloat16):
        _, whole = gradients(model, None)
        _, parts = gradients(model, 64)
    distance = [
        torch.cat([(mine - exact).flatten() for mine, exact in zip(some, truth, strict=True)]).norm()
        for some in (whole, parts)
    ]
    assert distance[1] <= 1.1 * distance[0]


@pytest.mark.parametrize("options", [{"convolution": 0}, {"positions": "rotary"}, {"dropout": 0.2}], ids=str)
def test_with_every_other_option(options: dict) -> None:
    model = build(recipe.Attention(kind="linear"), torch.float64, **options)
    torch.manual_seed(0)
    _, parts = gradients(model, 64)
    if "dropout" in options:  # drawn in another order, but the same again in the backward pass: the loss falls
        loss = []
        for _ in range(2):
            torch.manual_seed(1)
            nats, found = gradients(model, 64)
            loss.append(nats)
            with torch.no_grad():
                for weight, gradient in zip(model.parameters(), found, strict=True):
                    weight -= 1e-3 * gradient
        assert loss[1] < loss[0]
        return
    _, whole = gradients(model, None)
    for mine, truth in zip(parts, whole, strict=True):
        assert laws.error(mine, truth) < 1e-10


@thinned(
    pytest.mark.parametrize("kind", ["linear", "window"]),
    pytest.mark.parametrize(
        "cut",
        [recipe.Downsample(factor=4, kind="conv"), recipe.Downsample(factor=3, kind="max")],
        ids=lambda cut: cut.kind,
    ),
    pytest.mark.parametrize("segment", [16, 50]),
)
def test_with_layers_that_read_blocks(kind: str, cut: recipe.Downsample, segment: int) -> None:
    """The gradient of a half-filled block reaches the segment before, wherever documents begin."""
    shape = recipe.Model(width=16, layers=3, heads=2, attention=recipe.Attention(kind=kind, window=16), downsample=cut)
    model = stirred(LanguageModel(shape, 50), 0.3).double()
    _, whole = gradients(model, None)
    _, parts = gradients(model, segment)
    model.activation_checkpointing = True
    _, both = gradients(model, segment)
    for mine, again, truth in zip(parts, both, whole, strict=True):
        assert max(laws.error(mine, truth), laws.error(again, truth)) < 1e-10


PEAK = """
import resource, torch
from lmlong import recipe
from lmlong.model.language_model import LanguageModel
from lmlong.model.segments import text_loss
torch.set_num_threads(1)
model = LanguageModel(recipe.Model(width=64, layers=2, heads=2, attention=recipe.Attention(kind="linear")), 300)
for time in (2048, 16_384):
    tokens = torch.zeros(1, time, dtype=torch.long)
    nats, _ = text_loss(model, tokens, tokens, segment=1024)
    nats.backward()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def test_layers_whose_state_grows_are_refused() -> None:
    options = recipe.Model(width=16, layers=2, heads=2, attention=recipe.Attention(kind=["linear", "softmax"]))
    tokens = torch.zeros(1, 20, dtype=torch.long)
    with pytest.raises(UsageError, match=r"segment: the state of softmax attention grows .* Leave this out, or use"):
        text_loss(LanguageModel(options, 40), tokens, tokens, segment=7)


def test_memory_is_that_of_a_segment() -> None:
    """In a process of its own, for the peak of this one is that of all tests before."""
    done = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, check=True)
    short, long = (int(kilobytes) // 1024 for kilobytes in done.stdout.split())
    assert long - short < 40  # the activations of 14,336 more tokens would take hundreds of megabytes
