"""Rows that come and go step as each would alone."""

from pathlib import Path
from typing import Any

import pytest
import torch
from interop.exported import FORMS, text, write_run
from machine import needs_native
from torch import Tensor

from lmlong.attention.base import state_tensors
from lmlong.model.fast_step import make_fast_step
from lmlong.model.language_model import LanguageModel, ModelState
from lmlong.model.learning import read as reading
from lmlong.model.row_step import NativeRowStep, TorchRowStep, make_row_step
from lmlong.recipe import Downsample

ROWS, STEPS = 5, 90
HOURGLASS: dict[str, Any] = {"layers": 3, "downsample": Downsample(factor=2)}


def prompts(model: LanguageModel, ids: Tensor) -> list[ModelState]:
    """The states after prompts of different lengths."""
    return [model(ids[row : row + 1, : 5 + row])[1] for row in range(ROWS)]


def differences(model: LanguageModel, native: bool) -> tuple[float, float]:
    """How far logits of rows that step together, some of them at a time, and their states are from those of each row
    alone, relative to the largest."""
    ids, steps = text(ROWS, STEPS + ROWS), make_row_step(model)
    assert isinstance(steps, NativeRowStep if native else TorchRowStep)
    alone = prompts(model, ids)
    rows, logits, states = [steps.admit(state) for state in alone], 0.0, 0.0
    for time in range(STEPS):
        together = [row for row in range(ROWS) if (7 * time + 3 * row) % 4][:: 1 - 2 * (time % 2)]
        tokens = torch.stack([ids[row, time + row] for row in together])
        found = steps([rows[row] for row in together], tokens)
        for place, row in enumerate(together):
            expected, alone[row] = model.step(tokens[place : place + 1], alone[row])
            logits = max(logits, apart(found[place], expected[0]))
    for row, state in zip(rows, alone, strict=True):
        pairs = zip(state_tensors(model.settle(row.state())), state_tensors(model.settle(state)), strict=True)
        if model.constant_state:  # else a batch pads what is shorter, to no effect
            states = max(states, *(apart(*pair) for pair in pairs))
    return logits, states


def apart(found: Tensor, expected: Tensor) -> float:
    assert found.shape == expected.shape
    scale = float(expected.double().abs().max()) if expected.numel() else 0.0
    return float((found.double() - expected.double()).abs().max()) / max(scale, 1e-30) if found.numel() else 0.0


@needs_native
@pytest.mark.parametrize("form", FORMS)
@torch.inference_mode()
def test_native_rows_are_those_of_each_alone_to_the_bit(tmp_path: Path, form: str) -> None:
    model = write_run(tmp_path / "run", **FORMS[form])
    model.fast_step = make_fast_step(model, tried=False)
    assert differences(model, native=True) == (0, 0)


@pytest.mark.parametrize("form", ["elu", "ngram", "tables of single tokens", "softmax", "window beside", "hourglass"])
@torch.inference_mode()
def test_rows_by_torch_are_those_of_each_alone(tmp_path: Path, form: str) -> None:
    model = write_run(tmp_path / "run", **(HOURGLASS if form == "hourglass" else FORMS[form]))
    logits, states = differences(model, native=False)
    assert logits < 1e-5 and states < 1e-5


@needs_native
@pytest.mark.parametrize("form", ["elu", "ngram", "softmax"])
@torch.inference_mode()
def test_states_that_went_in_and_came_out_stay_as_they_are(tmp_path: Path, form: str) -> None:
    model = write_run(tmp_path / "run", **FORMS[form])
    model.fast_step = make_fast_step(model, tried=False)
    steps, (given, *_) = make_row_step(model), prompts(model, text(ROWS, 10))
    row = steps.admit(given)
    before = [x.clone() for x in state_tensors(given)]
    steps([row], torch.tensor([98]))
    taken = row.state()
    kept = [x.clone() for x in state_tensors(taken)]
    for token in text(1, 50)[0]:  # more than a list of recent n-grams holds
        steps([row], token[None])
    assert all(map(torch.equal, state_tensors(given), before))
    assert all(map(torch.equal, state_tensors(taken), kept))


LEARNS = (True, False, False, True, False)
"""Whether each row learns."""


@pytest.mark.parametrize("native", [pytest.param(True, marks=needs_native), False])
@torch.inference_mode()
def test_rows_that_learn_and_rows_that_do_not_step_together(tmp_path: Path, native: bool) -> None:
    """The rows join at different times; each is that of a session that is written on alone."""
    model = write_run(tmp_path / "run", **FORMS["tables"])
    if native:
        model.fast_step = make_fast_step(model, tried=False)
    ids, steps = text(ROWS, STEPS + ROWS), make_row_step(model)
    begun = [reading.first_state(model, 1, learns) for learns in LEARNS]
    alone = [reading.read(model, ids[row : row + 1, : 5 + row], state)[1] for row, state in enumerate(begun)]
    rows, kept = [steps.admit(state) for state in alone], copies(alone)
    for time in range(STEPS):
        together = [row for row in range(ROWS) if (7 * time + 3 * row) % 4 and time >= 8 * row][:: 1 - 2 * (time % 2)]
        if not together:
            continue
        tokens = torch.stack([ids[row, time + row] for row in together])
        found = steps([rows[row] for row in together], tokens)
        for place, row in enumerate(together):
            expected, after = reading.step(model, tokens[place : place + 1], alone[row])
            alone[row] = reading.will_learn(after, False)
            assert apart(found[place], expected[0]) < (1e-30 if native else 1e-5)
        kept += copies([rows[time % ROWS].state()])
    assert all(torch.equal(*pair) for pair in kept), "states that went in and came out stay as they are"
    for row, state, learns in zip(rows, alone, LEARNS, strict=True):
        assert (row.state().learned is not None) == learns
        pairs = zip(state_tensors(model.settle(row.state())), state_tensors(model.settle(state)), strict=True)
        assert max(apart(*pair) for pair in pairs) < 1e-5
        assert state.learned is None or state.learned.delta.bias.abs().max() > 1e-3


def copies(states: list[ModelState]) -> list[tuple[Tensor, Tensor]]:
    return [(x, x.clone()) for x in state_tensors(states)]


@torch.inference_mode()
def test_a_row_that_cannot_learn_leaves_all_rows_as_they_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block that is learned from takes memory, which may be missing; the engine then steps each row alone."""
    model, ids = write_run(tmp_path / "run", **FORMS["elu"]), text(2, 40)
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
