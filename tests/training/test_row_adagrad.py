"""Tables of n-grams in training: the rule of a step, and what a run does with them."""

from pathlib import Path
from typing import Any

import pytest
import torch

import lmlong
from lmlong import recipe
from lmlong.model.ngram_embedding import NgramEmbedding
from lmlong.training import row_adagrad
from lmlong.training.prepare import prepare_new_run
from lmlong.training.row_adagrad import RowAdagrad
from lmlong.training.run import train

from .conftest import TABLES, Recipes, weights


def optimizer_of(reads_values: bool = True) -> RowAdagrad:
    tables = NgramEmbedding(recipe.NgramEmbedding(orders=[1], rows=20, width=4), 6).double()
    return RowAdagrad(tables, reads_values)


@pytest.mark.parametrize("reads_values", [True, False])
def test_a_step_is_row_wise_adagrad(reads_values: bool) -> None:
    optimizer, draw = optimizer_of(reads_values), torch.Generator().manual_seed(0)
    table, squares = torch.zeros(20, 4, dtype=torch.float64), torch.zeros(20, dtype=torch.float64)
    for step in range(6):
        gradient = torch.zeros_like(table)
        for _ in range(3):  # accumulated batches
            index = torch.randint(12, (2, 5), generator=draw)
            rows = torch.randn(2, 5, 4, generator=draw, dtype=torch.float64) * 10.0 ** (step - 3)
            gradient.index_add_(0, index.flatten(), rows.flatten(0, 1))
            optimizer.gradients.add(index, 7 * rows)
            optimizer.expect(10)
        optimizer.step(1 / (step + 1), torch.tensor(False), scale=7.0)
        for row in range(12):
            squares[row] += sum(float(x) ** 2 for x in gradient[row]) / 4
            table[row] -= 0.1 / (step + 1) * gradient[row] / (squares[row].sqrt() + 1e-10)
    assert torch.allclose(optimizer.tables.table, table, rtol=1e-12, atol=0)
    assert optimizer.squares is not None and torch.allclose(optimizer.squares, squares, rtol=1e-12, atol=0)


@pytest.mark.parametrize("bad", ["skipped", "not finite"])
def test_a_skipped_step_changes_nothing(bad: str) -> None:
    optimizer, one = optimizer_of(), torch.ones(1, 4, dtype=torch.float64)
    optimizer.gradients.add(torch.tensor([3, 4, 3]), one.expand(3, 4))
    optimizer.step()
    assert optimizer.squares is not None
    before = optimizer.tables.table.clone(), optimizer.squares.clone()
    assert before[0][3].allclose(torch.tensor(-0.1).double()) and before[1][3] == 4 and before[1][4] == 1
    optimizer.gradients.add(torch.tensor([3]), one * (torch.nan if bad == "not finite" else 1.0))
    optimizer.step(1.0, torch.tensor(bad == "skipped"))
    assert torch.equal(optimizer.tables.table, before[0]) and torch.equal(optimizer.squares, before[1])
    assert not optimizer.gradients.pieces


def test_unused_rows_are_not_read() -> None:
    optimizer = optimizer_of()
    optimizer.tables.table[5:] = torch.nan
    optimizer.squares = torch.full((20,), torch.nan).double()
    optimizer.squares[:5] = 0
    optimizer.gradients.add(torch.tensor([3]), torch.ones(1, 4, dtype=torch.float64))
    optimizer.step()
    optimizer.gradients.add(torch.tensor([2]), torch.full((1, 4), 1e-14).double())  # a rounding error
    optimizer.step()
    assert optimizer.tables.table[2].abs().max() < 1e-4 < optimizer.tables.table[3].abs().max()
    assert optimizer.tables.table[:5].isfinite().all() and optimizer.tables.table[5:].isnan().all()


def test_rate_follows_the_schedule(recipe_of: Recipes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    factors: list[float] = []
    step = RowAdagrad.step

    def noted(self: RowAdagrad, factor: float, *more: Any) -> None:
        factors.append(factor)
        step(self, factor, *more)

    monkeypatch.setattr(row_adagrad.RowAdagrad, "step", noted)
    train(recipe_of(TABLES, "training.accumulate=2", "training.warmup_steps=4", "training.steps=6"), tmp_path / "run")
    assert factors == pytest.approx([1 / 3, 2 / 3, 1, 1, 0.75, 0.25], rel=0.1)


def test_added_tables_change_no_logit(recipe_of: Recipes, run: Path, tmp_path: Path) -> None:
    start = recipe_of(f"training.init_from={run}", TABLES, "training.steps=3")
    tokens = torch.arange(30)[None] + 97
    plain, added = prepare_new_run(recipe_of(f"training.init_from={run}")).model, prepare_new_run(start).model
    assert torch.equal(plain(tokens)[0], added(tokens)[0])
    train(start, tmp_path / "added")
    train(recipe_of(f"training.init_from={tmp_path / 'added'}", "training.steps=1"), tmp_path / "again")
    kept, changed = (weights(tmp_path / name)["ngram_embedding.table"] for name in ("added", "again"))
    assert kept.any() and changed.any(1).sum() >= kept.any(1).sum() and not torch.equal(kept, changed)


def test_frozen_tables_do_not_move(recipe_of: Recipes, tmp_path: Path) -> None:
    """While only the mixers learn a teacher's layers. A run with tables writes."""
    train(recipe_of(TABLES, "training.steps=3"), tmp_path / "base")
    assert "".join(lmlong.load(str(tmp_path / "base")).stream("the ", max_tokens=20))
    learned = ["training.teacher_of=layers", "model.attention.kind=delta", "training.steps=2"]
    base = [f"training.{key}={tmp_path / 'base'}" for key in ("init_from", "teacher")]
    train(recipe_of(*base, *learned), tmp_path / "student")
    before, after = weights(tmp_path / "base"), weights(tmp_path / "student")
    assert before["ngram_embedding.table"].any()
    assert all(torch.equal(before[name], after[name]) for name in before if name.startswith("ngram_embedding."))
