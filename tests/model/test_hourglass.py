"""The hourglass: as it is defined, values and gradients, and when its layers compute."""

from functools import partial

import pytest
import torch
from model.shapes import shaped
from model.test_encoder import pooled
from model.test_laws import text
from models import stirred
from torch import Tensor, nn
from torch.testing import assert_close

from lmlong import recipe
from lmlong.attention import laws
from lmlong.attention.base import state_tensors
from lmlong.attention.softmax import state as softmax
from lmlong.model.hourglass import Hourglass, hourglass_reference
from lmlong.model.rope import document_positions
from lmlong.model.state import concat_states
from lmlong.model.stretch import Stretch, block_phase

BLOCKS = [
    recipe.Downsample(factor=2, layers=2),
    recipe.Downsample(factor=3, kind="conv"),
    recipe.Downsample(factor=4, kind="max", layers=1),
]


def numbers(state: object) -> int:
    return sum(tensor.numel() for tensor in state_tensors(state))


@pytest.mark.parametrize("kinds", [["softmax"], ["linear", "window", "softmax"]], ids=str)
@torch.no_grad()
def test_rows_that_fill_blocks_at_different_times_are_as_if_alone(
    kinds: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(softmax, "BLOCK", 4)
    attention = recipe.Attention(kind=kinds, window=5)  # type: ignore[arg-type]
    options = {"layers": 3, "attention": attention, "downsample": BLOCKS[0]}
    model, (tokens, _) = shaped(options, deviation=0.3).double(), text(4, 61)
    states = [model(row[None, : 2 + number])[1] for number, row in enumerate(tokens)]
    together = concat_states(states)
    for at in range(50):
        logits, together = model.step(tokens[range(4), range(2 + at, 6 + at)], together)
        for number, row in enumerate(tokens):
            alone, states[number] = model.step(row[2 + number + at, None], states[number])
            assert laws.error(logits[number], alone[0]) < 1e-10
    _, at_once = model(torch.stack([row[52 + n : 57 + n] for n, row in enumerate(tokens)]), together)
    logits, _ = model.step(tokens[:, 0], at_once)
    for number, row in enumerate(tokens):
        _, state = model(row[None, 52 + number : 57 + number], states[number])
        assert laws.error(logits[number], model.step(row[None, 0], state)[0][0]) < 1e-10
    assert numbers(together) < 1.5 * sum(map(numbers, states))  # what only some rows took is gathered now and then


def in_all(x: Tensor) -> Tensor:
    """An inner layer that any other order, or any other document, would change."""
    return x.cumsum(-2).tanh() * torch.linspace(1, 2, x.shape[-1], dtype=x.dtype)


class Restarting(nn.Module):
    """The same over documents packed in rows, from the sum of those before: a block with the state of one mixer."""

    mixers = (None,)

    def forward(self, x: Tensor, before: tuple[Tensor], stretch: Stretch) -> tuple[Tensor, tuple[Tensor]]:
        rows = []
        for row, total in enumerate(before[0]):
            made = []
            for block, number in zip(x[row], stretch.in_document[row], strict=True):
                total = block if number == 0 else total + block
                made.append(total)
            rows.append(torch.stack(made))
        sums = torch.stack(rows)
        return sums.tanh() * torch.linspace(1, 2, x.shape[-1], dtype=x.dtype), (sums[:, -1],)


@pytest.mark.parametrize("cut", BLOCKS, ids=lambda cut: f"{cut.kind}-{cut.factor}")
@pytest.mark.parametrize("spaced", [True, False], ids=["even", "uneven"])
def test_values_and_gradients_are_those_of_the_definition(cut: recipe.Downsample, spaced: bool) -> None:
    width, time = 6, 37
    hourglass = stirred(Hourglass(recipe.Model(width=width, heads=1, downsample=cut))).double()
    x = torch.randn(2, time, width, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x.requires_grad_()
    documents = [[0, 4 * cut.factor], [0, 8 * cut.factor]] if spaced else [[0, 1, 17], [0, 9, 20]]
    starts = torch.zeros(2, time, dtype=torch.bool)
    for row, begins in enumerate(documents):
        starts[row, begins] = True
    position = torch.zeros(2, dtype=torch.long)
    phase = block_phase(cut.factor, position, starts, time)
    assert phase.even == spaced
    state = hourglass.init_state(2, x.device, x.dtype)
    stretch = Stretch(document_positions(starts, position, time), starts, phase=phase)
    inside = (torch.zeros_like(x[:, 0]),)
    y, _, _ = hourglass(x, state, stretch, [Restarting()], inside, lambda time: nn.Module.__call__)  # type: ignore

    def inner(blocks: Tensor) -> Tensor:
        return nn.functional.linear(hourglass.norm(in_all(blocks)), hourglass.out_proj.weight)

    pool = partial(pooled, hourglass)
    rows = zip(x, documents, strict=True)
    expected = torch.stack([hourglass_reference(row, begins, cut.factor, pool, inner) for row, begins in rows])
    assert_close(y, expected, rtol=1e-10, atol=1e-10)
    weights = [x, *hourglass.parameters()]
    slope = torch.randn(y.shape, dtype=y.dtype, generator=torch.Generator().manual_seed(1))
    mine, truth = (torch.autograd.grad(out, weights, slope) for out in (y, expected))
    for gradient, other in zip(mine, truth, strict=True):
        assert_close(gradient, other, rtol=1e-10, atol=1e-10)


@torch.no_grad()
def test_inner_layers_rest_until_a_block_is_full() -> None:
    model, calls = shaped({"layers": 3, "downsample": BLOCKS[2]}), []
    model.blocks[1].mixer.in_proj.register_forward_hook(lambda *_: calls.append(1))
    state = model.init_state(2)
    for token in range(12):
        _, state = model.step(torch.tensor([token, token]), state)
        assert len(calls) == (token + 1) // 4
