"""Rows of an engine that come and go, and several tokens of a row in one pass, give what steps of each alone give."""

from typing import Any

import pytest
import torch
from grids import thinned
from machine import needs_native
from model.shapes import KEPT, SHAPES, compiled, every_shape, shaped
from models import model_of, text
from torch import Tensor

from lmlong.attention.base import state_tensors
from lmlong.decode.engine import EagerEngine, Engine, engine_of, step
from lmlong.decode.native import NativeEngine
from lmlong.model.learning import read as reading

ROWS, STEPS = 5, 60
SOME_LEARN = (True, False, False, True, False)


def apart(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference, relative to the largest number."""
    assert found.shape == expected.shape
    scale = float(expected.double().abs().max()) if expected.numel() else 0.0
    return float((found.double() - expected.double()).abs().max()) / max(scale, 1e-30) if found.numel() else 0.0


def copies(states: Any) -> list[tuple[Tensor, Tensor]]:
    return [(x, x.clone()) for x in state_tensors(states)]


def check_rows(
    engine: Engine,
    allowed: float,
    learning: tuple[bool, ...] = (False,) * ROWS,
    steps: int = STEPS,
    threads: int = 1,
) -> None:
    """Step some of the rows at a time, in changing order, by 1 to `threads` threads. Compare logits and states with
    those of each row alone, and states that went in and came out with what they were."""
    model = engine.model
    ids = text(ROWS, steps + ROWS).to(model.embedding.weight.device)
    begun = [reading.first_state(model, 1, learns) for learns in learning]
    alone = [reading.read(model, ids[n : n + 1, : 5 + n], state)[1] for n, state in enumerate(begun)]
    rows, kept = [engine.load(state) for state in alone], copies(alone)
    for time in range(steps):
        together = [row for row in range(ROWS) if (7 * time + 3 * row) % 4 and time >= 4 * row][:: 1 - 2 * (time % 2)]
        if not together:
            continue
        tokens = torch.stack([ids[row, time + row] for row in together])
        torch.set_num_threads(1 + time % threads)
        logits = engine.step([rows[row] for row in together], tokens.tolist())
        torch.set_num_threads(1)
        for index, row in enumerate(together):
            expected, after = step(model, tokens[index : index + 1], alone[row])
            assert (after.last_tokens is None) == (alone[row].last_tokens is None)
            alone[row] = reading.will_learn(after, False)
            assert apart(logits[index], expected[0]) <= allowed
        if time % 3 == 0:
            kept += copies([engine.save(rows[time % ROWS])])
    assert all(torch.equal(*pair) for pair in kept)
    for row, state, learns in zip(rows, alone, learning, strict=True):
        assert (row.learned is not None) == learns
        if model.constant_state:  # else a batch pads what is shorter, to no effect
            pairs = zip(state_tensors(model.settle(engine.save(row))), state_tensors(model.settle(state)), strict=True)
            assert max(apart(*pair) for pair in pairs) <= (1e-5 if learns else allowed)
        assert state.learned is None or state.learned.delta.bias.abs().max() > 1e-3


@needs_native
@thinned(every_shape, KEPT)
@torch.inference_mode()
def test_native_rows_are_those_of_each_alone_to_the_bit(shape: dict[str, Any], kept: str) -> None:
    engine = engine_of(compiled(shaped(shape, kept)))
    assert isinstance(engine, NativeEngine)
    check_rows(engine, 0, threads=3)


@pytest.mark.parametrize("shape", ["tables of single tokens", "growing hourglass", "window beside"])
@torch.inference_mode()
def test_rows_by_torch_are_those_of_each_alone(shape: str) -> None:
    check_rows(EagerEngine(shaped(SHAPES[shape], deviation=0.3)), 1e-5, steps=30)


@pytest.mark.parametrize("name", [pytest.param("native", marks=needs_native), "torch"])
@torch.inference_mode()
def test_rows_that_learn_and_rows_that_do_not_step_together(name: str) -> None:
    model = compiled(model_of("tables")) if name == "native" else model_of("tables")
    check_rows(engine_of(model), 0 if name == "native" else 1e-5, SOME_LEARN, steps=40)


@torch.inference_mode()
def test_a_row_that_cannot_learn_leaves_all_rows_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block that is learned from takes memory, which may be missing; the engine then steps each row alone."""
    model, ids = model_of("elu"), text(2, 40)
    engine = EagerEngine(model)
    begun = reading.first_state(model, 1, learn=True)
    states = [reading.read(model, ids[row : row + 1, :16], begun)[1] for row in range(2)]
    rows = [engine.load(state) for state in states]
    weight = model.lm_head.matrix
    with monkeypatch.context() as missing:
        missing.setattr(model.lm_head, "matrix", lambda dtype: weight(dtype)[1:])  # of another size
        with pytest.raises(RuntimeError):
            engine.step(rows, ids[:, 16].tolist())
    found = engine.step(rows, ids[:, 16].tolist())
    for row in range(2):
        expected, _ = step(model, ids[row, 16:17], states[row])
        assert apart(found[row], expected[0]) < 1e-5


@needs_native
@thinned(every_shape, KEPT, pytest.mark.parametrize("threads", [1, 3]))
@torch.inference_mode()
def test_a_pass_gives_the_bits_of_single_steps(shape: dict[str, Any], kept: str, threads: int) -> None:
    """All logits, hidden states and states of passes of 1 to 9 tokens, of which sometimes only a part is kept. States
    stay as they are when the row goes on. The text is longer than the lists of recent n-grams and a block of recent
    keys."""
    model, ids = compiled(shaped(shape, kept)), text(1, 150)
    tokens, state = ids[0, 7:].tolist(), model(ids[:, :7])[1]
    engine, given, read, size = engine_of(model), copies(state), 0, 0
    row, single = engine.load(state), engine.load(state)
    torch.set_num_threads(threads)
    try:
        while read < len(tokens):
            size = size % 9 + 1
            ahead = engine.read([row], [tokens[read : read + size]])
            (known,) = ahead.tokens
            assert 1 <= len(known) <= size and known == tokens[read : read + len(known)]
            taken = max(1, len(known) - read % 3)
            for index, token in enumerate(known[:taken]):
                alone = engine.read([single], [[token]])
                engine.advance(single, 1)
                found = (ahead.logits[:, index], ahead.hidden[:, index], engine.save(row, index + 1))
                assert_equal_bits(found, (alone.logits[:, 0], alone.hidden[:, 0], engine.save(single)))
                if (read + index) % 5 == 0:
                    given += copies(found)
            engine.advance(row, taken)
            read += taken
    finally:
        torch.set_num_threads(1)
    assert all(torch.equal(*pair) for pair in given)


def assert_equal_bits(state: Any, other: Any) -> None:
    pairs = zip(state_tensors(state), state_tensors(other), strict=True)
    assert all(x.dtype == y.dtype and torch.equal(x, y) for x, y in pairs)
