"""A run is one history: what is newest and best follows from what lies in its folder, however it came to lie there."""

import json
import math
import os
import pty
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from lmlong import load
from lmlong.checkpoint import manifest, read, write
from lmlong.cli.after_training import after_training
from lmlong.cli.info import info
from lmlong.errors import DivergedError, UsageError
from lmlong.model.metrics import LossTotals
from lmlong.training import callbacks
from lmlong.training.checkpoint_store import CheckpointStore
from lmlong.training.run import train
from lmlong.training.run_folder import RECORDS, locked

from .conftest import Poison, Recipes, checkpoint_at, copied, equal, kept_steps, logged_steps, losses, metrics

OFTEN = ["training.validate_every=1", "training.checkpoint_every=1"]


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy of the run of 12 steps with all of its checkpoints."""
    return copied(trained, tmp_path / "run")


def chosen(run: Path, name: str) -> int:
    return int(read.find(run / "checkpoints" / name).name[5:])


def validated(run: Path) -> dict[int, float]:
    """The validation of each step, by the metrics log."""
    return {line["step"]: line["validation"]["bits_per_byte"] for line in metrics(run) if "validation" in line}


def test_run_stops_early_without_improvement(
    recipe_of: Recipes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a third of it, but at least 50 steps, here a tenth of that; also since before a resume."""
    monkeypatch.setattr(callbacks, "MIN_PATIENCE", callbacks.MIN_PATIENCE / 10)
    run, worse = tmp_path / "run", (*OFTEN, "training.steps=8", "training.learning_rate=5")
    train(recipe_of(*OFTEN, "training.steps=1"), run)
    assert train(recipe_of(*worse), run, resume="auto").step == 6
    assert chosen(run, "best") == 1
    assert train(recipe_of(*worse, "training.early_stopping=false"), run, resume="auto").step == 8


def test_nan_validation_is_never_the_best(recipe_of: Recipes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    score, first = callbacks.loss_totals, [LossTotals(math.nan, 1, 1)]
    monkeypatch.setattr(callbacks, "MIN_PATIENCE", 4)
    monkeypatch.setattr(callbacks, "loss_totals", lambda *given: first.pop() if first else score(*given))
    result = train(recipe_of("training.validate_every=2", "training.steps=8"), tmp_path / "run")
    assert (result.step, first) == (8, [])


def test_best_is_kept_by_a_worse_resume(recipe_of: Recipes, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert "got worse" not in after_training(train(recipe_of(*OFTEN, "training.steps=5"), run))
    assert chosen(run, "best") == 5
    result = train(recipe_of(*OFTEN, "training.steps=8", "training.learning_rate=5"), run, resume="auto")
    known = validated(run)
    assert min(known, key=known.__getitem__) == 5, "this test needs later steps that are worse"
    assert (chosen(run, "best"), kept_steps(run)) == (5, [5, 8])
    assert f"got worse    from {known[5]:.3f} after step 5 to {known[8]:.3f}" in after_training(result)
    assert result.validation.bits_per_byte == pytest.approx(known[5], rel=1e-6), "of the weights that commands load"

    assert load(run, "cpu").step == 5
    done = CliRunner().invoke(info, [str(run), "--json"], catch_exceptions=False)
    assert f"{run}: loads step-00000005, the best by validation" in done.stderr
    assert f"({run}/checkpoints/latest)" in done.stderr and json.loads(done.stdout)["step"] == 5
    for name in ("latest", "step-00000008"):
        alone = CliRunner().invoke(info, [str(run / "checkpoints" / name), "--json"], catch_exceptions=False)
        assert (alone.stderr, json.loads(alone.stdout)["step"]) == ("", 8)
    assert train(recipe_of(*OFTEN, "training.steps=9"), run, resume="auto").losses.keys() == set(range(1, 10))


def test_best_is_judged_as_it_will_be_used(recipe_of: Recipes, tmp_path: Path) -> None:
    """Weights that will be rounded are not compared with validations of others."""
    train(recipe_of(*OFTEN, "training.keep_last=9", "training.steps=8", "training.quantize=int4"), tmp_path / "run")
    known = {step for step in kept_steps(tmp_path / "run") if about(tmp_path / "run", step).validation is not None}
    assert known == {7, 8} and set(validated(tmp_path / "run")) == set(range(1, 9))


def about(run: Path, step: int) -> manifest.Manifest:
    return manifest.read(checkpoint_at(run, step))


def test_infinite_validation_is_never_the_best(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints", keep_last=9)
    for step, validation in ((1, float("nan")), (2, 3.0), (3, float("inf")), (4, 3.0)):
        store.save(write.Contents({"a": torch.ones(1)}, {}, "", b"", step, validation))
    assert chosen(tmp_path, "best") == 2


def weights_digests(run: Path, steps: Iterable[int]) -> list[str]:
    return [about(run, step).files["model.safetensors"]["sha256"] for step in steps]


def test_branch_that_is_given_up_is_moved_aside(
    run: Path, recipe_of: Recipes, tmp_path: Path, poison: Poison, capsys: pytest.CaptureFixture[str]
) -> None:
    """The new branch, stopped before its first checkpoint, resumes from where it began."""
    branch, given_up, later = ["training.keep_last=9", "training.learning_rate=2e-2"], losses(run), range(5, 13)
    aside, digests = run / "abandoned-1", weights_digests(run, later)
    poison({1})
    with pytest.raises(DivergedError):
        train(recipe_of(*branch), run, resume=str(checkpoint_at(run, 4)))
    assert f"moved aside to {aside}: step-00000005, step-00000006" in capsys.readouterr().err
    assert kept_steps(aside) == [*later] and losses(aside) == given_up and chosen(aside, "latest") == 12
    assert weights_digests(aside, later) == digests
    assert logged_steps(run) == [1, 2, 3, 4, 5] and losses(run)[:4] == given_up[:4]
    assert kept_steps(run) == [1, 2, 3, 4] and chosen(run, "latest") == 4
    poison(set())
    fresh = Path(shutil.copytree(run, tmp_path / "fresh", symlinks=True, ignore=lambda *_: [aside.name, ".lock"]))
    for each in (run, fresh):
        train(recipe_of(*branch), each, resume="auto")
    assert equal(run, fresh) and losses(run)[4:] != given_up[4:]

    # gone back to what was given up: what was made since is moved aside, and the metrics are those that led there
    train(recipe_of("training.steps=14"), run, resume=str(checkpoint_at(aside, 8)))
    assert kept_steps(run / "abandoned-2") == [1, 2, 3, 4, 6, 8, 12]
    assert logged_steps(run) == [*range(1, 15)] and losses(run)[:8] == given_up[:8]


def test_links_of_earlier_versions_are_removed(run: Path, recipe_of: Recipes) -> None:
    links, best = [run / "checkpoints" / name for name in ("latest", "best")], chosen(run, "best")
    for target in ("step-00000003", "step-00000099", "/tmp"):
        for link in links:
            link.symlink_to(target)
        assert (chosen(run, "latest"), chosen(run, "best")) == (12, best), target
        train(recipe_of("training.keep_last=2"), run, resume="auto")
        assert set(kept_steps(run)) == {11, 12, best} and not any(link.is_symlink() for link in links)


def test_files_beside_checkpoints_are_kept(four_steps: Path, recipe_of: Recipes, tmp_path: Path) -> None:
    run = copied(four_steps, tmp_path / "run")
    beside = run / "checkpoints"
    shutil.copytree(beside / "step-00000004", beside / "step-00000004-mine")
    (beside / "step-good").mkdir()
    (beside / ".x.partial").write_text("a plain file")
    (beside / ".mine.removed").mkdir()
    (beside / "step-00000099").write_text("a plain file")
    (beside / "step-00000098").symlink_to("step-00000004-mine")
    shutil.copytree(beside / "step-00000004", beside / "step-00000097")  # under another step's name
    before = {path.name for path in beside.iterdir()}
    train(recipe_of("training.steps=8"), run, resume="auto")
    assert before - {path.name for path in beside.iterdir()} == {"step-00000004"}
    assert chosen(run, "latest") == 8


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ({}, "exists"),
        ({"overwrite": True}, "not a run of lmlong, so --overwrite leaves it alone"),
        ({"resume": "auto"}, "Choose --out"),
        ({"resume": "RUN"}, "Choose --out"),
    ],
)
def test_files_that_are_of_no_run_are_kept(
    recipe_of: Recipes, trained: Path, tmp_path: Path, how: dict[str, Any], why: str
) -> None:
    if how.get("resume") == "RUN":
        how = {"resume": str(trained)}
    for name in RECORDS:
        mine = tmp_path / name.strip(".") / name
        mine.parent.mkdir()
        mine.write_text("mine")
        with pytest.raises(UsageError, match=why):
            train(recipe_of(), mine.parent, **how)
        assert [(path.name, path.read_text()) for path in mine.parent.iterdir()] == [(name, "mine")]


PLACES = ("thesis.tex", "notes/a.txt", "checkpoints/step-00000001-mine/a", "checkpoints/mine", "abandoned-1/mine",
          "checkpoints/step-00000001/mine.txt", "checkpoints/step-00000001/notes/a", ".git/config",
          "tensorboard/thesis.tex", "csv/from-00000001/notes.csv", ".thesis.partial")  # fmt: skip


def test_run_is_overwritten_unless_it_has_other_files(run: Path, recipe_of: Recipes, tmp_path: Path) -> None:
    def refused() -> None:
        with pytest.raises(UsageError, match="not part of a run, and --overwrite would delete it"):
            train(recipe_of("training.steps=1"), run, overwrite=True)

    for place in PLACES:
        mine = run / place
        new = [folder for folder in mine.parents if not folder.exists()]
        mine.parent.mkdir(parents=True, exist_ok=True)
        mine.write_text("mine")
        refused()
        assert mine.read_text() == "mine" and chosen(run, "latest") == 12
        mine.unlink()
        for folder in new:
            folder.rmdir()
    (run / "checkpoints").rename(tmp_path / "elsewhere")
    (run / "checkpoints").symlink_to(tmp_path / "elsewhere")
    refused()
    (run / "checkpoints").unlink()
    (tmp_path / "elsewhere").rename(run / "checkpoints")

    run.rename(tmp_path / "disk")
    run.symlink_to(tmp_path / "disk")
    train(recipe_of("training.steps=2"), run, overwrite=True)
    assert run.is_symlink() and kept_steps(tmp_path / "disk") == [2] and logged_steps(tmp_path / "disk") == [1, 2]


def test_folder_of_another_user_is_refused(users_folder: Path) -> None:
    users_folder.chmod(0o555)
    why = r"cannot be written to \(Permission denied\)\. Choose another --out\."
    for folder in (users_folder, users_folder / "run"):
        with pytest.raises(UsageError, match=why), locked(folder):
            pytest.fail("it was locked")


def test_mistake_keeps_the_run(run: Path, recipe_of: Recipes) -> None:
    for key in ("init_from", "teacher"):
        with pytest.raises(UsageError, match=rf"training\.{key}: .* is in .*, which --overwrite empties"):
            train(recipe_of(f"training.{key}={run}"), run, overwrite=True)
    with pytest.raises(UsageError):
        train(recipe_of("text.sequence_length=100000"), run, overwrite=True)
    with pytest.raises(UsageError, match="Leave out one"):
        train(recipe_of(), run, resume="auto", overwrite=True)
    assert chosen(run, "latest") == 12


IN_A_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # the terminal of this session
os.execv(sys.executable, [sys.executable, "-m", "lmlong", *sys.argv[1:]])
"""


def test_closed_terminal_leaves_a_checkpoint(tiny: Path, recipe_of: Recipes, tmp_path: Path) -> None:
    """Whatever is written to it then fails: the progress bar, and what is printed at the end. Until then no other
    process trains in that folder."""
    run = tmp_path / "run"
    ours, its = pty.openpty()
    words = ["train", tiny, "--out", run, "training.steps=100000"]
    child = subprocess.Popen(
        [sys.executable, "-c", IN_A_TERMINAL, *words], stdin=its, stdout=its, stderr=its, start_new_session=True
    )
    os.close(its)
    try:
        while not metrics(run):
            os.read(ours, 1 << 16)
        for how in ({}, {"overwrite": True}, {"resume": "auto"}):
            with pytest.raises(UsageError, match=r"another process is training in it\. Wait for it, stop it"):
                train(recipe_of(), run, **how)  # type: ignore[arg-type]
        os.close(ours)  # which has the kernel send SIGHUP
        assert child.wait(60) == 129
    finally:
        child.kill()
        child.wait()
    assert chosen(run, "latest") == logged_steps(run)[-1]


def test_moved_checkpoint_keeps_the_metrics(run: Path, recipe_of: Recipes) -> None:
    shutil.move(checkpoint_at(run, 12), run / "checkpoints" / "keep")
    train(recipe_of("training.steps=13"), run, resume=str(run / "checkpoints" / "keep"))
    assert logged_steps(run) == list(range(1, 14))


def test_damaged_checkpoint_is_never_pruned(run: Path, recipe_of: Recipes) -> None:
    manifest_of_two = checkpoint_at(run, 2) / "manifest.json"
    manifest_of_two.write_text(manifest_of_two.read_text().replace("validation", "valibation"))
    train(recipe_of(*OFTEN, "training.steps=13"), run, resume="auto")
    assert 2 in kept_steps(run) and 3 not in kept_steps(run)
