"""The hourglass: as it is defined, values and gradients, and every law for models that have one."""

import pytest
import torch
from attention.cases import FORMS, both_types, name
from grids import thinned
from model.test_laws import VOCABULARY, check_laws, check_state_size, text
from models import predict, stirred
from torch import Tensor, nn
from torch.testing import assert_close

from lmlong import recipe
from lmlong.attention import laws
from lmlong.attention.base import state_tensors
from lmlong.attention.softmax import state as softmax
from lmlong.model.hourglass import Hourglass, hourglass_reference
from lmlong.model.language_model import LanguageModel
from lmlong.model.rope import document_positions
from lmlong.model.state import concat_states, state_row
from lmlong.model.stretch import BlockPhase, Stretch, block_phase

CHOSEN = [form for form in FORMS if name(form) in {"elu-learned", "softmax"}]
MIXED = recipe.Attention(kind=["linear", "window", "softmax"], window=5)
every_form = pytest.mark.parametrize("form", [*CHOSEN, MIXED], ids=name)
CUTS = [
    recipe.Downsample(factor=2, layers=2),
    recipe.Downsample(factor=3, kind="conv"),
    recipe.Downsample(factor=4, kind="max", layers=1),
]
every_cut = pytest.mark.parametrize("cut", CUTS, ids=lambda cut: f"{cut.kind}-{cut.factor}")


def build(form: recipe.Attention, cut: recipe.Downsample, dtype: torch.dtype, **shape: object) -> LanguageModel:
    options = recipe.Model(width=16, layers=3, heads=2, attention=form, downsample=cut, **shape)  # type: ignore[arg-type]
    return stirred(LanguageModel(options, VOCABULARY), 0.3).to(dtype).eval()


def numbers(state: object) -> int:
    return sum(tensor.numel() for tensor in state_tensors(state))


def even(tokens: Tensor, factor: int) -> Tensor:
    """Starts at borders of blocks, a different set in each row."""
    starts = torch.zeros_like(tokens, dtype=torch.bool)
    starts[0, [0, 4 * factor]] = True
    starts[1, [7 * factor, 8 * factor]] = True
    return starts


@thinned(every_form, every_cut, both_types)
def test_all_laws(form: recipe.Attention, cut: recipe.Downsample, dtype: torch.dtype) -> None:
    model, x = build(form, cut, dtype), text()
    for inputs in (x, (x[0], even(x[0], cut.factor))):
        # rows that grow at different times are side by side in more than one way
        for rows in (inputs,) if "softmax" not in form.kind else (state_row(inputs, 0), state_row(inputs, 1)):
            check_laws(model, rows)


@thinned(every_form, every_cut)
@torch.no_grad()
def test_rows_that_fill_blocks_at_different_times_are_as_if_alone(
    form: recipe.Attention, cut: recipe.Downsample, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(softmax, "BLOCK", 4)
    model, (tokens, _) = build(form, cut, torch.float64), text(batch=4, time=61)
    states = [model(row[None, : 2 + number])[1] for number, row in enumerate(tokens)]
    together = concat_states(states)
    for at in range(50):
        logits, together = model.step(tokens[range(4), range(2 + at, 6 + at)], together)
        for number, row in enumerate(tokens):
            alone, states[number] = model.step(row[2 + number + at, None], states[number])
            assert laws.error(logits[number], alone[0]) < 1e-10
    _, at_once = predict(model, torch.stack([row[52 + n : 57 + n] for n, row in enumerate(tokens)]), together)
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


@every_cut
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

    def pool(block: Tensor) -> Tensor:
        if hourglass.convolution is not None:
            return hourglass.convolution.weight @ block.flatten()
        return block.mean(0) if cut.kind == "mean" else block.max(0).values

    def inner(blocks: Tensor) -> Tensor:
        return nn.functional.linear(hourglass.norm(in_all(blocks)), hourglass.out_proj.weight)

    expected = torch.stack(
        [hourglass_reference(row, begins, cut.factor, pool, inner) for row, begins in zip(x, documents, strict=True)]
    )
    assert_close(y, expected, rtol=1e-10, atol=1e-10)
    weights = [x, *hourglass.parameters()]
    slope = torch.randn(y.shape, dtype=y.dtype, generator=torch.Generator().manual_seed(1))
    mine, truth = (torch.autograd.grad(out, weights, slope) for out in (y, expected))
    for gradient, other in zip(mine, truth, strict=True):
        assert_close(gradient, other, rtol=1e-10, atol=1e-10)


def test_a_phase_describes_the_blocks_of_a_call() -> None:
    position = torch.tensor([0, 4])
    starts = torch.zeros(2, 8, dtype=torch.bool)
    assert block_phase(4, position, None, 8) == BlockPhase(2, 3, True, True)
    assert block_phase(4, position + 4, None, 8) == BlockPhase(2, 3, True, False)
    assert block_phase(4, position + 6, None, 8) == BlockPhase(2, 1, True, False)
    assert block_phase(4, position, None, 3) == BlockPhase(0, 0, True, False)
    assert block_phase(4, torch.tensor([3, 5]), None, 7) == BlockPhase(2, 0, False, True)
    assert block_phase(4, torch.tensor([7, 5]), None, 1) == BlockPhase(1, 0, False, False)
    starts[0, 4] = True
    assert block_phase(4, position, starts, 8) == BlockPhase(2, 3, True, True)
    starts[0, 5] = True
    assert not block_phase(4, position, starts, 8).even


@torch.no_grad()
def test_inner_layers_rest_until_a_block_is_full() -> None:
    model, calls = build(recipe.Attention(kind="linear"), CUTS[2], torch.float64), []
    model.blocks[1].mixer.in_proj.register_forward_hook(lambda *_: calls.append(1))
    state = model.init_state(2)
    for token in range(12):
        _, state = model.step(torch.tensor([token, token]), state)
        assert len(calls) == (token + 1) // 4


@every_cut
def test_the_state_never_grows(cut: recipe.Downsample) -> None:
    check_state_size(build(recipe.Attention(kind="linear"), cut, torch.float32))
