"""Rows of an engine that come and go, against each row alone."""

from typing import Any

import torch
from models import text
from torch import Tensor

from lmlong.attention.base import state_tensors
from lmlong.decode.engine import Engine, step
from lmlong.model.learning import read as reading

ROWS, STEPS = 5, 60


def apart(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference, relative to the largest number."""
    assert found.shape == expected.shape
    scale = float(expected.double().abs().max()) if expected.numel() else 0.0
    return float((found.double() - expected.double()).abs().max()) / max(scale, 1e-30) if found.numel() else 0.0


def copies(states: Any) -> list[tuple[Tensor, Tensor]]:
    return [(x, x.clone()) for x in state_tensors(states)]


def check_rows(engine: Engine, allowed: float, learning: tuple[bool, ...] = (False,) * ROWS) -> None:
    """Step some of the rows at a time, in changing order. Compare logits and states with those of each row alone, and
    states that went in and came out with what they were."""
    model = engine.model
    ids = text(ROWS, STEPS + ROWS).to(model.embedding.weight.device)
    begun = [reading.first_state(model, 1, learns) for learns in learning]
    alone = [reading.read(model, ids[n : n + 1, : 5 + n], state)[1] for n, state in enumerate(begun)]
    rows, kept = [engine.load(state) for state in alone], copies(alone)
    for time in range(STEPS):
        together = [row for row in range(ROWS) if (7 * time + 3 * row) % 4 and time >= 4 * row][:: 1 - 2 * (time % 2)]
        if not together:
            continue
        tokens = torch.stack([ids[row, time + row] for row in together])
        logits = engine.step([rows[row] for row in together], tokens.tolist())
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
