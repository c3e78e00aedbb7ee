"""Several tokens of one text in one pass of native code against one step for each token, to the bit."""

from pathlib import Path
from random import Random
from typing import Any, get_args

import pytest
import torch
from interop.exported import FORMS, text, write_run
from machine import needs_native
from model.test_native_step import SHAPES, compiled, shaped

from lmlong.attention.base import state_tensors
from lmlong.model.language_model import LanguageModel, ModelState
from lmlong.model.native_step import NativeStep
from lmlong.model.quantization import WeightFormat
from lmlong.model.row_step import NativeRowStep, make_row_step
from lmlong.native.state import map_state

pytestmark = needs_native

WITHOUT_HOURGLASS = [shape for shape in SHAPES if "downsample" not in shape]


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


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("form", FORMS)
@torch.inference_mode()
def test_a_pass_gives_the_bits_of_single_steps(tmp_path: Path, form: str, threads: int) -> None:
    """The text is longer than the lists of recent n-grams and a block of recent keys."""
    model = compiled(write_run(tmp_path / "run", **FORMS[form]))
    ids = text(1, 150)
    assert_passes_equal_steps(model, ids[0, 7:].tolist(), model(ids[:, :7])[1], threads)


@pytest.mark.parametrize("kept", get_args(WeightFormat))
@pytest.mark.parametrize("shape", WITHOUT_HOURGLASS[::3], ids=str)
@torch.inference_mode()
def test_quantized_weights_give_the_same_bits_too(shape: dict[str, Any], kept: WeightFormat) -> None:
    model = compiled(shaped(shape, kept))
    assert_passes_equal_steps(model, (text(1, 40)[0] % 20).tolist(), model.init_state(1))


@torch.inference_mode()
def test_states_that_were_given_away_stay_as_they_are(tmp_path: Path) -> None:
    model = compiled(write_run(tmp_path / "run", **FORMS["tables"]))
    ids = text(1, 200)
    steps, given = make_row_step(model), [model(ids[:, :7])[1]]
    assert isinstance(steps, NativeRowStep)
    row, draw, read = steps.admit(given[0]), Random(0), 7
    copies = [map_state(torch.clone, given[0])]
    while read < 190:
        ahead = steps.ahead(row, ids[0, read : read + draw.randint(1, 9)].tolist())
        for count in range(len(ahead.tokens) + 1):
            if draw.random() < 0.2:
                given.append(row.state(ahead.tokens[:count]))
                copies.append(map_state(torch.clone, given[-1]))
        kept = draw.randint(1, len(ahead.tokens))
        row.advance(ahead.tokens[:kept])
        read += kept
    for state, copy in zip(given, copies, strict=True):
        assert_equal_bits(state, copy)
