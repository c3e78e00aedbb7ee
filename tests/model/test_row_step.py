"""Rows that come and go step as each would alone."""

from pathlib import Path
from typing import Any

import pytest
import torch
from interop.exported import FORMS, text, write_run
from machine import needs_compiler
from torch import Tensor

from lmlong.attention.base import state_tensors
from lmlong.model.fast_step import make_fast_step
from lmlong.model.language_model import LanguageModel, ModelState
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


@needs_compiler
@pytest.mark.parametrize("form", FORMS)
@torch.inference_mode()
def test_native_rows_are_those_of_each_alone_to_the_bit(tmp_path: Path, form: str) -> None:
    model = write_run(tmp_path / "run", **FORMS[form])
    model.fast_step = make_fast_step(model, tried=False)
    assert differences(model, native=True) == (0, 0)


@pytest.mark.parametrize("form", ["elu", "ngram", "softmax", "window beside", "hourglass"])
@torch.inference_mode()
def test_rows_by_torch_are_those_of_each_alone(tmp_path: Path, form: str) -> None:
    model = write_run(tmp_path / "run", **(HOURGLASS if form == "hourglass" else FORMS[form]))
    logits, states = differences(model, native=False)
    assert logits < 1e-5 and states < 1e-5


@needs_compiler
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
