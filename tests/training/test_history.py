"""A run is one history: what is newest and best follows from what lies in its folder, however it came to lie there."""

import json
import math
import os
import pty
import shutil
import subprocess
import sys
from pathlib import Path

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
from lmlong.training.run_folder import locked

from .conftest import Poison, Recipes, checkpoint_at, copied, equal, logged_steps, losses, metrics

OFTEN = ["training.validate_every=1", "training.checkpoint_every=1"]


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy of the run of 12 steps with all of its checkpoints."""
    return copied(trained, tmp_path / "run")


def steps(run: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in (run / "checkpoints").glob("step-*"))


def chosen(run: Path, name: str) -> int:
    return int(read.find(run / "checkpoints" / name).name[5:])


def validated(run: Path) -> dict[int, float]:
    """The validation of each step, by the metrics log."""
    return {line["step"]: line["validation"]["bits_per_byte"] for line in metrics(run) if "validation" in line}


# --- the best checkpoint


def test_run_stops_early_without_improvement(recipe_of: Recipes, tmp_path: Path) -> None:
    """For a third of it, but at least 50 steps, also since before a resume."""
    run, validates = tmp_path / "run", "training.validate_every=10"
    train(recipe_of(validates, "training.steps=10"), run)
    worse = (validates, "training.steps=80", "training.learning_rate=5")
    assert train(recipe_of(*worse), run, resume="auto").step == 60
    assert chosen(run, "best") == 10
    assert train(recipe_of(*worse, "training.early_stopping=false"), run, resume="auto").step == 80


def test_nan_validation_is_never_the_best(recipe_of: Recipes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    score, first = callbacks.loss_totals, [LossTotals(math.nan, 1, 1)]
    monkeypatch.setattr(callbacks, "loss_totals", lambda *given: first.pop() if first else score(*given))
    result = train(recipe_of("training.validate_every=10", "training.steps=80"), tmp_path / "run")
    assert (result.step, first) == (80, [])


def test_best_is_kept_by_a_worse_resume(recipe_of: Recipes, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert "got worse" not in after_training(train(recipe_of(*OFTEN, "training.steps=5"), run))
    assert chosen(run, "best") == 5
    result = train(recipe_of(*OFTEN, "training.steps=8", "training.learning_rate=5"), run, resume="auto")
    known = validated(run)
    assert min(known, key=known.__getitem__) == 5, "this test needs later steps that are worse"
    assert (chosen(run, "best"), steps(run)) == (5, [5, 8])
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


@pytest.mark.parametrize(("option", "judged"), [("quantize=int4", {7, 8}), ("learn=0.5", set())])
def test_best_is_judged_as_it_will_be_used(recipe_of: Recipes, tmp_path: Path, option: str, judged: set[int]) -> None:
    """Weights that will be rounded are not compared with validations of others, nor learning models at all."""
    train(recipe_of(*OFTEN, "training.keep_last=9", "training.steps=8", f"training.{option}"), tmp_path / "run")
    known = {step for step in steps(tmp_path / "run") if about(tmp_path / "run", step).validation is not None}
    assert known == judged and set(validated(tmp_path / "run")) == set(range(1, 9))


def about(run: Path, step: int) -> manifest.Manifest:
    return manifest.read(run / "checkpoints" / f"step-{step:08d}")


def test_manifest_has_the_validation(run: Path) -> None:
    for step in range(1, 13):
        assert (about(run, step).step, about(run, step).validation) == (step, validated(run)[step])


def test_infinite_validation_is_never_the_best(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints", keep_last=9)
    for step, validation in ((1, float("nan")), (2, 3.0), (3, float("inf")), (4, 3.0)):
        store.save(write.Contents({"a": torch.ones(1)}, {}, "", b"", step, validation))
    assert chosen(tmp_path, "best") == 2


# --- branches


def test_new_branch_is_the_one_resumed(run: Path, recipe_of: Recipes, tmp_path: Path, poison: Poison) -> None:
    """Stopped before its first checkpoint it resumes from where it began, not from the branch that was given up."""
    branch, given_up = ["training.keep_last=9", "training.learning_rate=2e-2"], losses(run)
    poison({1})
    with pytest.raises(DivergedError):
        train(recipe_of(*branch), run, resume=str(checkpoint_at(run, 4)))
    assert logged_steps(run) == [1, 2, 3, 4, 5] and losses(run)[:4] == given_up[:4]
    assert steps(run) == [1, 2, 3, 4] and chosen(run, "latest") == 4
    poison(set())
    fresh = Path(shutil.copytree(run, tmp_path / "fresh", symlinks=True, ignore=lambda *_: ["abandoned-1", ".lock"]))
    for each in (run, fresh):
        train(recipe_of(*branch), each, resume="auto")
    assert equal(run, fresh) and losses(run)[4:] != given_up[4:]


def test_abandoned_branch_is_moved_aside(run: Path, recipe_of: Recipes, capsys: pytest.CaptureFixture[str]) -> None:
    first, later = losses(run), list(range(5, 13))
    kept = {step: write_digest(run, step) for step in later}
    train(recipe_of("training.keep_last=12", "seed=0"), run, resume=str(run / "checkpoints" / "step-00000004"))
    aside = run / "abandoned-1"
    assert f"moved aside to {aside}: step-00000005, step-00000006" in capsys.readouterr().err
    assert steps(aside) == later and losses(aside) == first and chosen(aside, "latest") == 12
    assert {step: write_digest(aside, step) for step in later} == kept

    # and gone back to: then what was made since is moved aside, and the metrics are those that led there
    train(recipe_of("training.steps=14"), run, resume=str(aside / "checkpoints" / "step-00000008"))
    assert steps(run / "abandoned-2") == [1, 2, 3, 4, 6, 8, 12]
    assert logged_steps(run) == list(range(1, 15)) and losses(run)[:8] == first[:8]


def write_digest(run: Path, step: int) -> str:
    return about(run, step).files["model.safetensors"]["sha256"]


def test_links_of_earlier_versions_are_removed(run: Path, recipe_of: Recipes) -> None:
    links, best = [run / "checkpoints" / name for name in ("latest", "best")], chosen(run, "best")
    for target in ("step-00000003", "step-00000099", "/tmp"):
        for link in links:
            link.symlink_to(target)
        assert (chosen(run, "latest"), chosen(run, "best")) == (12, best), target
        train(recipe_of("training.keep_last=2"), run, resume="auto")
        assert set(steps(run)) == {11, 12, best} and not any(link.is_symlink() for link in links)


# --- what else lies there


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


# --- overwriting


def test_only_a_run_is_overwritten(recipe_of: Recipes, tmp_path: Path) -> None:
    thesis = tmp_path / "mine" / "thesis.tex"
    thesis.parent.mkdir()
    thesis.write_text("years of work")
    with pytest.raises(UsageError, match=r"mine: not a run of lmlong, so --overwrite leaves it alone"):
        train(recipe_of("training.steps=1"), tmp_path / "mine", overwrite=True)
    (tmp_path / "mine" / "recipe.yaml").write_text("my own")
    for how in ({"overwrite": True}, {"resume": "auto"}, {}):
        with pytest.raises(UsageError):
            train(recipe_of("training.steps=1"), tmp_path / "mine", **how)  # type: ignore[arg-type]
    assert thesis.read_text() == "years of work" and sorted(p.name for p in thesis.parent.iterdir()) == [
        "recipe.yaml",
        "thesis.tex",
    ]


PLACES = ("thesis.tex", "notes/a.txt", "checkpoints/step-00000001-mine/a", "checkpoints/mine", "abandoned-1/mine",
          "checkpoints/step-00000001/mine.txt", "checkpoints/step-00000001/notes/a", ".git/config",
          "tensorboard/thesis.tex", "csv/from-00000001/notes.csv", ".thesis.partial")  # fmt: skip


def test_run_with_other_files_is_not_overwritten(run: Path, recipe_of: Recipes, tmp_path: Path) -> None:
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
    train(recipe_of("training.steps=1"), run, overwrite=True)
    assert steps(run) == [1]


def test_run_behind_a_link_is_replaced(recipe_of: Recipes, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "disk")
    train(recipe_of("training.steps=3", "training.keep_last=9"), tmp_path / "run")
    train(recipe_of("training.steps=2"), tmp_path / "run", overwrite=True)
    assert (tmp_path / "run").is_symlink() and steps(tmp_path / "disk") == [2]
    assert logged_steps(tmp_path / "disk") == [1, 2]


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


# --- the end of a terminal


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


# --- what is somebody's own


def test_moved_checkpoint_keeps_the_metrics(run: Path, recipe_of: Recipes) -> None:
    shutil.move(checkpoint_at(run, 12), run / "checkpoints" / "keep")
    train(recipe_of("training.steps=13"), run, resume=str(run / "checkpoints" / "keep"))
    assert logged_steps(run) == list(range(1, 14))


@pytest.mark.parametrize("how", ["auto", "other"])
def test_resume_overwrites_no_file(recipe_of: Recipes, trained: Path, tmp_path: Path, how: str) -> None:
    for name in ("metrics.jsonl", "environment.json", "recipe.yaml", "tokenizer.model"):
        mine = tmp_path / name.strip(".") / name
        mine.parent.mkdir()
        mine.write_text("mine")
        with pytest.raises(UsageError, match=r"Choose (another )?--out"):
            train(recipe_of(), mine.parent, resume="auto" if how == "auto" else str(trained))
        assert mine.read_text() == "mine"


def test_damaged_checkpoint_is_never_pruned(run: Path, recipe_of: Recipes) -> None:
    manifest_of_two = checkpoint_at(run, 2) / "manifest.json"
    manifest_of_two.write_text(manifest_of_two.read_text().replace("validation", "valibation"))
    train(recipe_of(*OFTEN, "training.steps=13"), run, resume="auto")
    assert 2 in steps(run) and 3 not in steps(run)
