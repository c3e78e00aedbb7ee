"""Predictions of a teacher that are kept: the same run as with the teacher, which is then no longer needed."""

import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from lmlong.errors import RecipeError
from lmlong.training import kept_predictions
from lmlong.training.kept_predictions import KeptFile, Row
from lmlong.training.run import train

from .conftest import Recipes, assert_resumes_exactly, lmlong, losses, weights

ALL = 1000  # more than the vocabulary


@pytest.fixture(scope="module")
def teacher(shared: Path, shared_recipe_of: Recipes) -> Path:
    train(shared_recipe_of("model.attention.kind=softmax"), shared / "teacher")
    return shared / "teacher"


@pytest.fixture
def taught(shared_recipe_of: Recipes, teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recipes:
    """The recipe with a teacher, and predictions in a folder of the test's own."""
    monkeypatch.setattr(kept_predictions, "cache_folder", lambda: tmp_path / "kept")
    return lambda *overrides: shared_recipe_of(f"training.teacher={teacher}", *overrides)


def kept(folder: Path) -> Path:
    (file,) = (folder / "kept" / "predictions").glob("*.predictions")
    return file


class CountedLoads:
    """How often a teacher is loaded."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.count, load = 0, kept_predictions.load_teacher

        def counted(options: Any) -> Any:
            self.count += 1
            return load(options)

        monkeypatch.setattr(kept_predictions, "load_teacher", counted)


def test_with_all_tokens_the_run_is_that_with_the_teacher(taught: Recipes, tmp_path: Path) -> None:
    train(taught(), tmp_path / "live")
    for name, options in {"kept": [], "segments": ["training.segment=16"]}.items():
        train(taught(f"training.keep_predictions={ALL}", *options), tmp_path / name)
        assert losses(tmp_path / name) == pytest.approx(losses(tmp_path / "live"), rel=1e-5)
        for weight, live in zip(weights(tmp_path / name).values(), weights(tmp_path / "live").values(), strict=True):
            torch.testing.assert_close(weight, live, rtol=1e-3, atol=1e-3)


def test_few_tokens_teach_nearly_as_much(taught: Recipes, tmp_path: Path) -> None:
    share = "training.teacher_share=1"
    for name, options in {"whole": [], "few": ["training.keep_predictions=32"]}.items():
        train(taught(share, *options), tmp_path / name)
    assert losses(tmp_path / "few")[-1] == pytest.approx(losses(tmp_path / "whole")[-1], rel=0.02)


def test_the_teacher_is_loaded_once_and_not_again_by_another_run(
    taught: Recipes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads = CountedLoads(monkeypatch)
    options = "training.keep_predictions=8"
    train(taught(options), tmp_path / "first")
    assert loads.count == 1
    size = kept(tmp_path).stat().st_size
    train(taught(options, "training.learning_rate=1e-3"), tmp_path / "second")
    assert loads.count == 1 and kept(tmp_path).stat().st_size == size
    train(taught(options, "training.steps=15"), tmp_path / "longer")
    assert loads.count == 2 and size < kept(tmp_path).stat().st_size < 1.5 * size  # only the three new batches
    monkeypatch.setattr(kept_predictions, "AHEAD", 1)
    train(taught(options, "seed=1"), tmp_path / "other")
    assert loads.count > 3  # of other rows, batch by batch


def test_it_resumes_exactly(taught: Recipes, tmp_path: Path) -> None:
    assert_resumes_exactly(taught, tmp_path, "training.keep_predictions=8", "training.teacher_temperature=2")


def test_a_damaged_record_is_computed_again_and_a_cut_one_removed(
    taught: Recipes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = "training.keep_predictions=8"
    train(taught(options), tmp_path / "whole")
    file, expected = kept(tmp_path), losses(tmp_path / "whole")
    content = file.read_bytes()
    loads = CountedLoads(monkeypatch)
    for number, damaged in enumerate(
        (content[:-7], content[: len(content) // 2], content[:900] + b"\1" + content[901:], b"", b"another file\n")
    ):
        file.write_bytes(damaged)
        train(taught(options), tmp_path / f"{number}")
        assert loads.count == number + 1
        assert losses(tmp_path / f"{number}") == expected
        assert len(file.read_bytes()) >= len(content)


def test_a_killed_run_leaves_predictions_that_the_next_one_uses(
    taught: Recipes, shared: Path, teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a process of its own, which is killed."""
    options = [f"training.teacher={teacher}", "training.keep_predictions=8", "training.steps=100000"]
    with monkeypatch.context() as patch:
        patch.setenv("LMLONG_CACHE", str(tmp_path / "kept"))
        child = lmlong("train", shared / "tiny.yaml", "--out", tmp_path / "killed", *options)
    assert child.stderr is not None
    next(line for line in child.stderr if line.startswith("step "))
    child.send_signal(signal.SIGKILL)
    child.wait()
    before = kept(tmp_path).stat().st_size
    assert before > 10_000
    train(taught("training.keep_predictions=8"), tmp_path / "after")
    assert kept(tmp_path).stat().st_size == before


def test_records_are_what_was_added(tmp_path: Path) -> None:
    about = {"kept": 2, "vocabulary": 9}
    file = KeptFile(tmp_path / "x.predictions", about)
    file.update(is_locked=True)
    row = Row(torch.tensor([[3, 1], [8, 0]]), torch.tensor([[-1.0, -2, -3], [0, -torch.inf, -torch.inf]]))
    wrong = Row(torch.tensor([[9, 1]]), torch.zeros(1, 3))
    file.add([(b"a" * 16, row), (b"b" * 16, wrong)])
    again = KeptFile(tmp_path / "x.predictions", about)
    again.update()
    for each in (file, again):
        found = each.row(b"a" * 16, 2)
        assert found is not None and all(map(torch.equal, found, row))
        assert each.row(b"a" * 16, 1) is None and each.row(b"c" * 16, 2) is None
        assert each.row(b"b" * 16, 1) is None  # a token that is not in the vocabulary
    other = KeptFile(tmp_path / "x.predictions", {**about, "kept": 3})
    other.update()
    assert other.row(b"a" * 16, 2) is None


@pytest.mark.parametrize(
    "options",
    [
        ["training.keep_predictions=4"],
        ["training.teacher=runs/t", "training.teacher_of=layers", "training.keep_predictions=4"],
        ["training.teacher=runs/t", "devices=2", "training.keep_predictions=4"],
    ],
)
def test_what_it_does_not_fit_is_refused(shared_recipe_of: Recipes, options: list[str]) -> None:
    with pytest.raises(RecipeError, match="keep_predictions"):
        shared_recipe_of(*options)
