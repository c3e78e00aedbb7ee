"""The laws of the contract once more, on the logits of whole language models."""

import pytest
import torch
from attention.cases import both_types
from grids import thinned
from model.shapes import SHAPES, shaped
from models import predict

from lmlong.attention import laws
from lmlong.attention.base import state_tensors
from lmlong.attention.laws import Subject, Text
from lmlong.model.language_model import LanguageModel
from lmlong.model.segments import text_loss

VOCABULARY, TIME = 50, 131
EXACT = {torch.float64: 1e-10, torch.float32: 1e-4}
LAWFUL = (
    *("elu", "softmax like Llama", "long convolution", "sink", "window beside", "tables"),
    *("conv of blocks", "growing hourglass"),
)
"""Models whose logits keep the laws; those of all attentions are in tests/attention."""


def subject(model: LanguageModel) -> Subject:
    def step(x: Text, state: object) -> tuple[torch.Tensor, object]:
        tokens, starts = x
        if starts is not None and starts.any():  # a start within a batch is read, not stepped
            return predict(model, tokens, state, starts)
        logits, state = model.step(tokens[:, 0], state)
        return logits[:, None], state

    return Subject(model.init_state, lambda x, state: predict(model, x[0], state, x[1]), step, model.settle)


def text(batch: int = 2, time: int = TIME, seed: int = 0) -> Text:
    draw = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCABULARY, (batch, time), generator=draw)
    return tokens, torch.rand(batch, time, generator=draw) < 1 / 25


@torch.no_grad()
def check_laws(model: LanguageModel, x: Text) -> None:
    """Check that a model reads a text alike in all ways."""
    reader, other, allowed = subject(model), text(len(x[0]), seed=1), EXACT[model.embedding.weight.dtype]
    assert laws.steps_equal_forward(reader, x) < allowed
    assert laws.cuts_change_nothing(reader, x, [1, 2, 40, 64, 129]) < allowed
    for time in (1, 5, 64, 130):
        assert laws.future_leaves_past(reader, x, other, time) == 0.0
    assert laws.state_is_not_modified(reader, x) == 0.0
    assert len(x[0]) == 1 or laws.rows_are_independent(reader, x, other) == 0.0


@torch.no_grad()
def check_state_size(model: LanguageModel) -> None:
    """Check that a state neither grows nor keeps the memory of a larger tensor."""
    assert len({laws.numbers_in_state(subject(model), text(time=time)) for time in (1, 50, 131)}) == 1
    tokens, starts = text()
    for tensor in state_tensors(model(tokens, None, starts)[1]):
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


@thinned(pytest.mark.parametrize("name", LAWFUL), both_types)
def test_all_laws(name: str, dtype: torch.dtype) -> None:
    model, (tokens, starts) = shaped(SHAPES[name], deviation=0.3).to(dtype), text()
    check_laws(model, (tokens, starts))
    if model.constant_state:
        check_state_size(model)
    if model.hourglass:
        factor, even = model.hourglass.factor, torch.zeros_like(starts)
        even[0, [0, 4 * factor]] = True
        even[1, [7 * factor, 8 * factor]] = True
        # rows that grow at different times are side by side in more than one way
        for rows in [[0, 1]] if model.constant_state else [[0], [1]]:
            check_laws(model, (tokens[rows], even[rows]))


def test_gradients_of_packed_documents_are_those_of_each_alone() -> None:
    model = shaped({}).double()
    tokens, _ = text(batch=1)
    targets = tokens.roll(-1, 1)
    starts = torch.zeros_like(tokens, dtype=torch.bool)
    starts[:, [0, 2, 64, 100]] = True
    packed, _ = text_loss(model, tokens, targets, starts)
    together = torch.autograd.grad(packed, list(model.parameters()))
    alone = [torch.zeros_like(weight) for weight in model.parameters()]
    for begin, stop in ((0, 2), (2, 64), (64, 100), (100, TIME)):
        loss, _ = text_loss(model, tokens[:, begin:stop], targets[:, begin:stop])
        for total, part in zip(alone, torch.autograd.grad(loss, list(model.parameters())), strict=True):
            total += part
    for mine, truth in zip(together, alone, strict=True):
        assert laws.error(mine, truth) < 1e-10
