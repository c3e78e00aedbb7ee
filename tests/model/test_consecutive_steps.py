"""Several tokens of one text in one pass of native code against one step for each token, to the bit."""

from pathlib import Path
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

pytestmark = needs_native

WITHOUT_HOURGLASS = [shape for shape in SHAPES if "downsample" not in shape]


def assert_passes_equal_steps(model: LanguageModel, tokens: list[int], state: ModelState, threads: int = 1) -> None:
    """Compare all logits, hidden states and states after `tokens`, read in passes of 1 to 9 tokens."""
    step, single, read, size = model.fast_step, state, 0, 0
    assert isinstance(step, NativeStep)
    torch.set_num_threads(threads)
    try:
        while read < len(tokens):
            size = size % 9 + 1
            outputs = step.steps(tokens[read : read + size], state)
            assert 1 <= len(outputs) <= size
            for token, output in zip(tokens[read:], outputs, strict=False):
                *expected, single = step(torch.tensor([token]), single, None)
                pairs = zip(state_tensors((*output,)), state_tensors((*expected, single)), strict=True)
                assert all(x.dtype == y.dtype and torch.equal(x, y) for x, y in pairs)
            read, state = read + len(outputs), outputs[-1][2]
    finally:
        torch.set_num_threads(1)


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
def test_states_before_a_pass_stay_as_they_are(tmp_path: Path) -> None:
    model = compiled(write_run(tmp_path / "run", **FORMS["tables"]))
    ids = text(1, 60)
    state = model(ids[:, :7])[1]
    kept = [x.clone() for x in state_tensors(state)]
    outputs = model.fast_step.steps(ids[0, 7:15].tolist(), state)  # type: ignore[union-attr]
    states = [[x.clone() for x in state_tensors(output)] for output in outputs]
    model.fast_step.steps(ids[0, 15:50].tolist(), outputs[3][2])  # type: ignore[union-attr]
    assert all(map(torch.equal, state_tensors(state), kept))
    for output, copies in zip(outputs, states, strict=True):
        assert all(map(torch.equal, state_tensors(output), copies))
