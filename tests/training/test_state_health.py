"""Effective memory and denominators of each head, as a run logs them."""

from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from lmlong.attention.recurrence import memory_lengths
from lmlong.checkpoint import read
from lmlong.cli.info import info
from lmlong.evaluation.state_health import denominators
from lmlong.model.metrics import batch_tensors
from lmlong.training.prepare import prepare_run
from lmlong.training.run import train

from .conftest import Recipes, metrics


def health(run: Path) -> list[dict]:
    return [line["state"] for line in metrics(run) if "state" in line]


@pytest.mark.parametrize(
    ("options", "block", "longest"),
    [
        ([], 1, 8192),
        (["model.attention.longest_memory=64k"], 1, 65536),
        (["model.downsample={factor: 4, layers: 1}"], 4, 8192),
    ],
)
def test_memories_of_fixed_gates_are_those_of_their_decay(
    recipe_of: Recipes, tmp_path: Path, options: list[str], block: int, longest: int
) -> None:
    train(recipe_of("model.layers=3", "model.attention.decay=fixed", "training.steps=1", *options), tmp_path / "run")
    (layers,) = health(tmp_path / "run")
    exact = -1 / torch.log1p(-1 / torch.tensor([2.0, longest]))
    assert [numbers["layer"] for numbers in layers] == [1, 2, 3]
    for numbers, size in zip(layers, (1, block, 1), strict=True):
        assert numbers["effective_memory"] == pytest.approx((size * exact).tolist(), rel=0.05)


def test_learned_gates_begin_there_and_change(recipe_of: Recipes, tmp_path: Path) -> None:
    train(recipe_of("training.validate_every=1", "training.steps=2", "training.warmup_steps=0"), tmp_path / "run")
    first, second = health(tmp_path / "run")
    assert first[0]["effective_memory"] == pytest.approx(memory_lengths(2).tolist(), rel=0.5)
    assert first != second


def test_denominators_are_the_smallest_of_the_validation_text(recipe_of: Recipes, trained: Path) -> None:
    setup = prepare_run(recipe_of(), read.find(trained))
    smallest = min(
        found.smallest
        for tokens, _, starts in map(batch_tensors, setup.data.validation())
        for found in denominators(setup.model.eval(), tokens, starts)  # type: ignore[arg-type]
    )
    assert min(min(n["smallest_denominator"]) for n in health(trained)[-1]) == pytest.approx(smallest, rel=1e-3)


def test_what_forgets_nothing_has_no_memory_length_and_softmax_no_numbers(recipe_of: Recipes, tmp_path: Path) -> None:
    train(recipe_of("model.attention.decay=none", "training.steps=1"), tmp_path / "none")
    assert [numbers["effective_memory"] for numbers in health(tmp_path / "none")[0]] == [[None, None]] * 2
    train(recipe_of("model.attention.kind=softmax", "training.steps=1"), tmp_path / "softmax")
    assert health(tmp_path / "softmax") == []


def test_info_prints_them(recipe_of: Recipes, tmp_path: Path) -> None:
    train(recipe_of("training.state_passing=0.5", "training.steps=2"), tmp_path / "run")
    printed = CliRunner().invoke(info, [str(tmp_path / "run")], catch_exceptions=False).stdout
    memory = health(tmp_path / "run")[-1][0]["effective_memory"]
    assert f"layer 1 {' '.join(f'{tokens:,.4g}' for tokens in memory)}" in " ".join(printed.split())
    assert "smallest denominators" in printed
    assert "trained from states       of other texts" in printed.splitlines()
