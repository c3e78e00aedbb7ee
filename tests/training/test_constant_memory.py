"""Memory in use does not grow with the number of steps."""

from itertools import count
from pathlib import Path
from typing import Any

import pytest
from allocations import ROUND, ROUNDS, in_use, is_flat, with_mallinfo

from lmlong.training import module
from lmlong.training.run import train

from .conftest import Recipes


class Flat(Exception):
    """A round of steps has kept no memory."""


@with_mallinfo
def test_steps_take_constant_memory(recipe_of: Recipes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loss, step, used = module.text_loss, count(), []

    def counted(*inputs: Any) -> Any:
        if next(step) % ROUND == 0:
            used.append(in_use())
            if is_flat(used):
                raise Flat
        return loss(*inputs)

    monkeypatch.setattr(module, "text_loss", counted)
    steps = f"training.steps={ROUND * ROUNDS}"
    with pytest.raises(Flat):
        train(recipe_of(steps, f"training.log_every={ROUND}", "model.width=16"), tmp_path / "run")
