"""Rows that come and go, and several tokens of a row in one pass, give what single steps of each row give."""

from random import Random
from typing import Any, get_args

import pytest
import torch
from grids import thinned
from machine import needs_native
from model.test_graph_step import record
from model.test_native_step import SHAPES, compiled, shaped
from models import FORMS, model_of, stirred, text
from torch import Tensor

from lmlong.attention.base import state_tensors
from lmlong.model.fast_step import make_fast_step
from lmlong.model.language_model import LanguageModel, ModelState
from lmlong.model.learning import read as reading
from lmlong.model.native_step import NativeStep
from lmlong.model.quantization import WeightFormat
from lmlong.model.row_step import GraphRowStep, NativeRowStep, TorchRowStep, make_row_step
from lmlong.native.state import map_state
from lmlong.recipe import Downsample, Model

ROWS, STEPS = 5, 60


def native(form: str) -> LanguageModel:
    model = model_of(form)
    model.fast_step = make_fast_step(model, tried=False)
    return model


def hourglass() -> LanguageModel:
    options = Model(width=16, layers=3, heads=2, downsample=Downsample(factor=2))
    return stirred(LanguageModel(options, 258), 0.3).eval()


def apart(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference, relative to the largest number."""
    assert found.shape == expected.shape
    scale = float(expected.double().abs().max()) if expected.numel() else 0.0
    return float((found.double() - expected.double()).abs().max()) / max(scale, 1e-30) if found.numel() else 0.0


def copies(states: Any) -> list[tuple[Tensor, Tensor]]:
    return [(x, x.clone()) for x in state_tensors(states)]


def check_rows(model: LanguageModel, steps: Any, allowed: float, learning: tuple[bool, ...] = (False,) * ROWS) -> None:
    """Step some of the rows at a time, in changing order. Compare logits and states with those of each row alone, and
    states that went in and came out with what they were."""
    ids = text(ROWS, STEPS + ROWS)
    begun = [reading.first_state(model, 1, learns) for learns in learning]
    alone = [reading.read(model, ids[n : n + 1, : 5 + n], state)[1] for n, state in enumerate(begun)]
    rows, kept = [steps.admit(state) for state in alone], copies(alone)
    for time in range(STEPS):
        together = [row for row in range(ROWS) if (7 * time + 3 * row) % 4 and time >= 4 * row][:: 1 - 2 * (time % 2)]
        if not together:
            continue
        tokens = torch.stack([ids[row, time + row] for row in together])
        logits = steps([rows[row] for row in together], tokens)
        for index, row in enumerate(together):
            expected, after = reading.step(model, tokens[index : index + 1], alone[row])
            alone[row] = reading.will_learn(after, False)
            assert apart(logits[index], expected[0]) <= allowed
        if time % 3 == 0:
            kept += copies([rows[time % ROWS].state()])
    assert all(torch.equal(*pair) for pair in kept)
    for row, state, learns in zip(rows, alone, learning, strict=True):
        assert (row.state().learned is not None) == learns
        if model.constant_state:  # else a batch pads what is shorter, to no effect
            pairs = zip(state_tensors(model.settle(row.state())), state_tensors(model.settle(state)), strict=True)
            assert max(apart(*pair) for pair in pairs) <= (1e-5 if learns else allowed)
        assert state.learned is None or state.learned.delta.bias.abs().max() > 1e-3


@needs_native
@pytest.mark.parametrize("form", FORMS)
@torch.inference_mode()
def test_native_rows_are_those_of_each_alone_to_the_bit(form: str) -> None:
    model = native(form)
    steps = make_row_step(model)
    assert isinstance(steps, NativeRowStep)
    check_rows(model, steps, 0)


@pytest.mark.parametrize("form", ["elu", "ngram", "tables of single tokens", "softmax", "window beside", "hourglass"])
@torch.inference_mode()
def test_rows_by_torch_are_those_of_each_alone(form: str) -> None:
    model = hourglass() if form == "hourglass" else model_of(form)
    steps = make_row_step(model)
    assert isinstance(steps, TorchRowStep)
    check_rows(model, steps, 1e-5)


@pytest.mark.parametrize("form", ["delta", "ngram", "tables", "hourglass"])
@torch.inference_mode()
def test_rows_by_a_recorded_graph_are_those_of_each_alone(form: str) -> None:
    model = (hourglass() if form == "hourglass" else model_of(form)).double()
    model.set_state_dtype(torch.float64)
    check_rows(model, GraphRowStep(model, record), 1e-10)


@pytest.mark.parametrize("engine", [pytest.param("native", marks=needs_native), "torch", "graph"])
@torch.inference_mode()
def test_rows_that_learn_and_rows_that_do_not_step_together(engine: str) -> None:
    model = native("tables") if engine == "native" else model_of("tables")
    steps = GraphRowStep(model, record) if engine == "graph" else make_row_step(model)
    check_rows(model, steps, 0 if engine == "native" else 1e-5, (True, False, False, True, False))


@torch.inference_mode()
def test_a_row_that_cannot_learn_leaves_all_rows_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block that is learned from takes memory, which may be missing; the engine then steps each row alone."""
    model, ids = model_of("elu"), text(2, 40)
    steps = make_row_step(model)
    begun = reading.first_state(model, 1, learn=True)
    states = [reading.read(model, ids[row : row + 1, :16], begun)[1] for row in range(2)]
    rows = [steps.admit(state) for state in states]
    weight = model.lm_head.matrix
    with monkeypatch.context() as missing:
        missing.setattr(model.lm_head, "matrix", lambda dtype: weight(dtype)[1:])  # of another size
        with pytest.raises(RuntimeError):
            steps(rows, ids[:, 16])
    found = steps(rows, ids[:, 16])
    for row in range(2):
        expected, _ = reading.step(model, ids[row, 16:17], states[row])
        assert apart(found[row], expected[0]) < 1e-5


def assert_passes_equal_steps(model: LanguageModel, tokens: list[int], state: ModelState, threads: int = 1) -> None:
    """Compare all logits, hidden states and states after `tokens`, read in passes of 1 to 9 tokens, of which sometimes
    only a part is kept."""
    step, steps, single, read, size = model.fast_step, make_row_step(model), state, 0, 0
    assert isinstance(step, NativeStep) and isinstance(steps, NativeRowStep)
    row = steps.admit(state)
    torch.set_num_threads(threads)
    try:
        while read < len(tokens):
            size = size % 9 + 1
            ahead = steps.ahead(row, tokens[read : read + size])
            assert 1 <= len(ahead.tokens) <= size and ahead.tokens == tokens[read : read + len(ahead.tokens)]
            kept = max(1, len(ahead.tokens) - read % 3)
            for index, token in enumerate(ahead.tokens[:kept]):
                *expected, single = step(torch.tensor([token]), single, None)
                found = (ahead.logits[index, None], ahead.hidden[index, None], row.state(ahead.tokens[: index + 1]))
                assert_equal_bits(found, (*expected, single))
            row.advance(ahead.tokens[:kept])
            read += kept
    finally:
        torch.set_num_threads(1)


def assert_equal_bits(state: Any, other: Any) -> None:
    pairs = zip(state_tensors(state), state_tensors(other), strict=True)
    assert all(x.dtype == y.dtype and torch.equal(x, y) for x, y in pairs)


@needs_native
@thinned(pytest.mark.parametrize("form", FORMS), pytest.mark.parametrize("threads", [1, 3]))
@torch.inference_mode()
def test_a_pass_gives_the_bits_of_single_steps(form: str, threads: int) -> None:
    """The text is longer than the lists of recent n-grams and a block of recent keys."""
    model, ids = native(form), text(1, 150)
    assert_passes_equal_steps(model, ids[0, 7:].tolist(), model(ids[:, :7])[1], threads)


@needs_native
@thinned(
    pytest.mark.parametrize("shape", [shape for shape in SHAPES if "downsample" not in shape][::3], ids=str),
    pytest.mark.parametrize("kept", get_args(WeightFormat)),
)
@torch.inference_mode()
def test_a_pass_with_quantized_weights_gives_the_bits_of_steps(shape: dict[str, Any], kept: WeightFormat) -> None:
    model = compiled(shaped(shape, kept))
    assert_passes_equal_steps(model, (text(1, 40)[0] % 20).tolist(), model.init_state(1))


@needs_native
@torch.inference_mode()
def test_states_that_passes_gave_away_stay_as_they_are() -> None:
    model, ids = native("tables"), text(1, 200)
    steps, given = make_row_step(model), [model(ids[:, :7])[1]]
    assert isinstance(steps, NativeRowStep)
    row, draw, read = steps.admit(given[0]), Random(0), 7
    copied = [map_state(torch.clone, given[0])]
    while read < 190:
        ahead = steps.ahead(row, ids[0, read : read + draw.randint(1, 9)].tolist())
        for count in range(len(ahead.tokens) + 1):
            if draw.random() < 0.2:
                given.append(row.state(ahead.tokens[:count]))
                copied.append(map_state(torch.clone, given[-1]))
        kept = draw.randint(1, len(ahead.tokens))
        row.advance(ahead.tokens[:kept])
        read += kept
    for state, copy in zip(given, copied, strict=True):
        assert_equal_bits(state, copy)
