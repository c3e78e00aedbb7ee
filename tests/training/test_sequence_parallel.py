"""Rows that several processes read in parts: what is refused, documents of any length, and launchers."""

import random
from pathlib import Path

import pytest

from lmlong.attention.plugins import load_plugin, unload_plugin
from lmlong.errors import UsageError
from lmlong.training.prepare import prepare_new_run
from lmlong.training.run import train

from .conftest import Recipes, logged_steps, losses, metrics, train_in_processes
from .test_launchers import succeed

ROWS = ("text.sequence_length=61", "training.batch_size=2", "training.steps=8", "training.schedule=constant")


def parts(number: int, *options: str) -> tuple[str, ...]:
    return *ROWS, f"devices={number}", f"training.sequence_parallel={number}", *options


@pytest.mark.slow
def test_short_documents_are_read_in_parts(tiny: Path, recipe_of: Recipes, tmp_path: Path) -> None:
    """Batches have different lengths."""
    draw, book = random.Random(1), tiny.with_name("book.txt").read_text()
    (tmp_path / "books").mkdir()
    for number in range(40):
        begin = draw.randrange(len(book) // 2)
        (tmp_path / "books" / f"{number}.txt").write_text(book[begin : begin + draw.choice([1, 35, 50, 130])])
    options = [
        *("text.rows=documents", f"text.sources.0.paths=[{tmp_path / 'books'}]"),
        *("text.validation.fraction=0.2", "training.steps=12", "training.batch_size=1"),
    ]
    train_in_processes(tiny, tmp_path / "three", *parts(3, *options))
    train(recipe_of(*ROWS, *options), tmp_path / "one")
    assert losses(tmp_path / "three") == pytest.approx(losses(tmp_path / "one"), rel=1e-4)


@pytest.mark.slow
def test_torchrun_logs_and_samples(tiny: Path, tmp_path: Path) -> None:
    options = parts(
        2,
        *("training.minutes=0.05", "training.steps=null", "training.validate_every=100000"),
        *("training.loggers=[tensorboard]", "training.sample_tokens=20"),
    )
    torchrun = ["torch.distributed.run", "--nproc-per-node", 2, "--standalone", "-m", "lmlong", "train", tiny]
    (output,), _ = succeed([*torchrun, *options, "--out", tmp_path / "run"], [{}])
    assert output.count("validation ") == 1
    steps = logged_steps(tmp_path / "run")
    assert steps == list(range(1, len(steps) + 1)) and steps
    assert sum("sample" in line for line in metrics(tmp_path / "run")) == 1
    assert len([*(tmp_path / "run" / "tensorboard").glob("events.*")]) == 1


def test_attention_without_effect_is_refused(recipe_of: Recipes) -> None:
    plugin = Path(__file__).parents[1] / "plugins" / "two_gates.py"
    options = (f"plugins=[{plugin}]", "model.attention.kind=[linear, two_gates]", "devices=2")
    load_plugin(plugin)
    try:
        divided = recipe_of(*options, "training.sequence_parallel=2")
        with pytest.raises(UsageError, match=r"sequence_parallel: .*TwoGates has no `effect`.* Define effect"):
            prepare_new_run(divided)
    finally:
        unload_plugin(plugin)
