"""What must not change what is trained: how a batch is read, and what is validated, saved and shown on the way."""

from pathlib import Path

import pytest
import torch

from lmlong.checkpoint import read
from lmlong.training.run import train

from .conftest import LAYERS_OF_A_TEACHER, TABLES, TEACHER, Recipes, equal, losses, metrics, of_run

PARTS = ("training.batch_size=2", "training.accumulate=2")
ROWS = ("training.batch_size=1", "training.accumulate=4")
SEGMENTS = ("training.segment=16",)
RECOMPUTED = ("training.activation_checkpointing=true",)
BOOKS = "BOOKS"
MASKED = (f"text.sources.0.paths=[{BOOKS}]", "text.validation.fraction=0.2", "objective=masked")
FULL = "model.attention.kind=full"

SAME: dict[str, tuple[tuple[str, ...], tuple[str, ...], float]] = {
    "plain": ((), (*PARTS, *SEGMENTS, *RECOMPUTED), 1e-4),
    "rows": ((), ROWS, 1e-4),
    "tables": ((TABLES,), (*PARTS, *SEGMENTS), 1e-4),
    "a teacher": ((TEACHER, "training.teacher_share=0.9"), (*PARTS, *SEGMENTS, *RECOMPUTED), 1e-4),
    "layers of a teacher": (LAYERS_OF_A_TEACHER, (*PARTS, *RECOMPUTED), 1e-3),
    "masked windows": ((*MASKED, FULL), ROWS, 1e-4),
    "masked documents": ((*MASKED, FULL, "text.rows=documents"), ROWS, 1e-4),
    "validated and saved often": (
        ("model.dropout=0.1", "training.carry_state=true"),
        ("training.validate_every=2", "training.checkpoint_every=2", "training.sample_tokens=9"),
        0,
    ),
}
"""What is trained, what is changed, and the relative error of the losses."""


def write_books(tiny: Path, folder: Path) -> Path:
    """Documents of a few lines each, of different lengths."""
    folder.mkdir()
    lines = tiny.with_name("book.txt").read_text().splitlines()
    for number in range(60):
        (folder / f"{number}.txt").write_text("\n".join(lines[number * 6 : number * 6 + 1 + number % 6]))
    return folder


@pytest.mark.parametrize("name", SAME)
def test_change_trains_the_same(recipe_of: Recipes, tiny: Path, softmax: Path, tmp_path: Path, name: str) -> None:
    trained, changed, error = SAME[name]
    books, whole, other = write_books(tiny, tmp_path / "books"), tmp_path / "whole", tmp_path / "other"
    options = [option.replace(BOOKS, str(books)) for option in ("training.steps=6", *of_run(trained, softmax))]
    train(recipe_of(*options), whole)
    train(recipe_of(*options, *changed), other)
    assert losses(other) == pytest.approx(losses(whole), rel=error)
    validated = [[line["validation"] for line in metrics(run) if "validation" in line] for run in (whole, other)]
    assert validated[0][-1]["tokens"] == validated[1][-1]["tokens"]
    if not error:
        assert equal(other, whole)
    if name == "tables":
        first, squares = (read.read_training(read.find(run))["row_squares"] for run in (whole, other))
        assert 0.02 < float((first > 0).float().mean()) < 0.98
        assert torch.allclose(squares, first, rtol=1e-2, atol=1e-12)
