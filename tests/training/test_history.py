"""A run is one history: what is newest and best follows from what lies in its folder, however it came to lie there."""

import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lmlong.checkpoint import manifest, read, write
from lmlong.errors import UsageError
from lmlong.recipe import Recipe
from lmlong.training.run import train

from .conftest import equal, ignored, lmlong, losses, metrics

Recipes = Callable[..., Recipe]
OFTEN = ["training.validate_every=1", "training.checkpoint_every=1"]


def steps(run: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in (run / "checkpoints").glob("step-*"))


def linked(run: Path, name: str) -> int:
    return int((run / "checkpoints" / name).resolve().name[5:])


def worth(run: Path) -> dict[int, float]:
    """What each step was found to be worth, by the metrics_log."""
    return {line["step"]: line["validation"]["bits_per_byte"] for line in metrics(run) if "validation" in line}


def weights(run: Path) -> dict[str, torch.Tensor]:
    return read.read_weights(read.find(run))


# --- the best checkpoint


def test_the_best_outlives_a_resume_that_finds_none_better(recipe_of: Recipes, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(recipe_of(*OFTEN, "training.steps=5"), run)
    assert linked(run, "best") == 5
    train(recipe_of(*OFTEN, "training.steps=8", "training.learning_rate=5"), run, resume="auto")
    assert min(worth(run), key=worth(run).__getitem__) == 5, "this test needs later steps that are worse"
    assert linked(run, "best") == 5 and 5 in steps(run)
    train(recipe_of(*OFTEN, "training.steps=9", "training.learning_rate=5"), run, resume="auto")
    assert (linked(run, "best"), steps(run)) == (5, [5, 9])


def test_the_manifest_tells_what_a_checkpoint_is_worth(recipe_of: Recipes, tmp_path: Path) -> None:
    train(
        recipe_of("training.validate_every=4", "training.checkpoint_every=2", "training.keep_last=9"), tmp_path / "run"
    )
    for step in steps(tmp_path / "run"):
        says = manifest.read(tmp_path / "run" / "checkpoints" / f"step-{step:08d}")
        assert (says.step, says.validation) == (step, worth(tmp_path / "run").get(step))


def test_a_figure_that_is_no_number_is_never_the_best(checkpoints: Path) -> None:
    assert linked(checkpoints, "best") == 2


@pytest.fixture
def checkpoints(tmp_path: Path) -> Path:
    """A run of three checkpoints of which one was worth nothing that is a number."""
    from lmlong.training.checkpoint_store import CheckpointStore

    kept = CheckpointStore(tmp_path / "checkpoints", keep_last=9)
    for step, validated in ((1, float("nan")), (2, 3.0), (3, float("inf")), (4, 3.0)):
        kept.save(write.Contents({"a": torch.ones(1)}, {}, "", b"", step, validated))
    return tmp_path


# --- branches


def test_a_branch_that_is_begun_is_the_one_gone_on_with(tiny: Path, recipe_of: Recipes, tmp_path: Path) -> None:
    """Killed before its first checkpoint it goes on from where it began, not from the branch that was given up."""
    run, every = tmp_path / "run", ["training.keep_last=9", "training.checkpoint_every=4"]
    train(recipe_of(*every), run)
    given_up = losses(run)
    older = run / "checkpoints" / "step-00000004"
    child = lmlong(
        *("train", tiny, "--out", run, "--resume", older, *every, "training.learning_rate=2e-2"),
        *("training.steps=4000", "training.checkpoint_every=4000", "training.validate_every=4000"),
    )
    while not losses(run) or losses(run)[-1][0] in (12, 4):
        time.sleep(0.002)
    child.send_signal(signal.SIGKILL)
    child.communicate()
    assert losses(run)[:4] == given_up[:4]
    assert steps(run) == [4] and linked(run, "latest") == 4

    train(recipe_of(*every, "training.learning_rate=2e-2"), run, resume="auto")
    shutil.copytree(older, tmp_path / "fresh" / "checkpoints" / "step-00000004")
    (tmp_path / "fresh" / "metrics.jsonl").write_text("".join(json.dumps(m) + "\n" for m in metrics(run)[:4]))
    train(recipe_of(*every, "training.learning_rate=2e-2"), tmp_path / "fresh", resume="auto")
    assert equal(run, tmp_path / "fresh")
    assert losses(run)[4:] != given_up[4:]


def test_what_was_given_up_is_moved_aside_as_a_run_of_its_own(
    recipe_of: Recipes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, every = tmp_path / "run", ["training.keep_last=9", "training.checkpoint_every=4"]
    train(recipe_of(*every), run)
    first, best = losses(run), linked(run, "best")
    kept = {step: write_digest(run, step) for step in (8, 12)}
    train(recipe_of(*every, "seed=0"), run, resume=str(run / "checkpoints" / "step-00000004"))
    aside = run / "abandoned-1"
    assert f"moved aside to {aside}: step-00000008, step-00000012" in capsys.readouterr().err
    assert steps(aside) == [8, 12] and losses(aside) == first and linked(aside, "latest") == 12
    assert {step: write_digest(aside, step) for step in (8, 12)} == kept and best == 12

    # and gone back to: then what was made since is moved aside, and the metrics are those that led there
    train(recipe_of(*every, "training.steps=14"), run, resume=str(aside / "checkpoints" / "step-00000008"))
    assert steps(run / "abandoned-2") == [4, 8, 12]
    assert [step for step, _ in losses(run)] == list(range(1, 15)) and losses(run)[:8] == first[:8]


def write_digest(run: Path, step: int) -> str:
    return manifest.read(run / "checkpoints" / f"step-{step:08d}").files["model.safetensors"]["sha256"]


def test_a_checkpoint_of_another_run_comes_with_its_history(recipe_of: Recipes, tmp_path: Path) -> None:
    train(recipe_of("training.steps=6", "training.schedule=constant"), tmp_path / "one")
    train(recipe_of("training.schedule=constant"), tmp_path / "two", resume=str(tmp_path / "one"))
    train(recipe_of("training.schedule=constant"), tmp_path / "whole")
    assert equal(tmp_path / "two", tmp_path / "whole")
    assert steps(tmp_path / "one") == [6], "the other run stays as it was"


# --- links


@pytest.mark.parametrize("broken", ["missing", "older", "dangling", "foreign"])
def test_links_are_repaired_before_a_run_goes_on(recipe_of: Recipes, tmp_path: Path, broken: str) -> None:
    """Also where nothing is left to train: a kill may have come between the last checkpoint and its link."""
    run = tmp_path / "run"
    train(recipe_of("training.keep_last=9", *OFTEN), run)
    best = linked(run, "best")
    for name in ("latest", "best"):
        link = run / "checkpoints" / name
        link.unlink()
        if broken != "missing":
            link.symlink_to({"older": "step-00000003", "dangling": "step-00000099", "foreign": "/tmp"}[broken])
    train(recipe_of("training.keep_last=9", *OFTEN), run, resume="auto")
    assert (linked(run, "latest"), linked(run, "best")) == (12, best)


# --- what else lies there


def test_what_users_put_beside_checkpoints_stays(recipe_of: Recipes, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(recipe_of("training.steps=4"), run)
    beside = run / "checkpoints"
    shutil.copytree(beside / "step-00000004", beside / "step-00000004-mine")
    (beside / "step-good").mkdir()
    (beside / ".x.partial").write_text("a plain file")
    (beside / ".mine.removed").mkdir()
    (beside / "step-00000099").write_text("a plain file")
    (beside / "step-00000098").symlink_to("step-00000004-mine")
    shutil.copytree(beside / "step-00000004", beside / "step-00000097")  # under another step's name
    before = {path.name for path in beside.iterdir()}
    train(recipe_of(), run, resume="auto")
    assert before - {path.name for path in beside.iterdir()} == {"step-00000004"}
    assert linked(run, "latest") == 12


@pytest.mark.parametrize(
    "garbage",
    [
        b"garbage\n",
        b"\xff\xfe\x00\n",
        b"[]\n",
        b'{"step": "3"}\n',
        b"\n",
        b'{"loss": 1}\n',
        b"[" * 10_000 + b"\n",
        b"{",
    ],
)
def test_garbage_among_the_metrics_never_blocks_a_resume(recipe_of: Recipes, tmp_path: Path, garbage: bytes) -> None:
    train(recipe_of("training.steps=6"), tmp_path / "run")
    path = tmp_path / "run" / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(
        b"".join([*lines[:2], garbage, *lines[2:]]) if garbage.endswith(b"\n") else path.read_bytes() + garbage
    )
    train(recipe_of("training.steps=8"), tmp_path / "run", resume="auto")
    assert [step for step, _ in losses(tmp_path / "run")] == list(range(1, 9))


# --- two trainings, and readers


def test_a_second_training_into_a_folder_is_refused_by_the_first_ones_name(
    tiny: Path, recipe_of: Recipes, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    first = lmlong("train", tiny, "--out", run, "training.steps=100000", "training.log_every=1")
    while not metrics(run):
        time.sleep(0.01)
    for how in ({}, {"overwrite": True}, {"resume": "auto"}):
        with pytest.raises(UsageError, match=rf"process {first.pid} on \S+ is training in it\. Wait for it, stop it"):
            train(recipe_of(), run, **how)  # type: ignore[arg-type]
    first.kill()
    first.communicate()
    assert train(recipe_of("training.steps=4"), run, resume="auto").signal is None


def test_a_run_is_read_while_its_checkpoints_are_replaced(recipe_of: Recipes, tmp_path: Path) -> None:
    """The newest goes away between finding and reading it, over and over."""
    train(recipe_of("training.steps=1"), tmp_path / "run")
    folder = tmp_path / "run" / "checkpoints"

    def replaced(checkpoint: Path) -> Path:
        step = int(checkpoint.name[5:])
        if step < 6:
            newer = folder / f"step-{step + 1:08d}"
            shutil.copytree(checkpoint, newer)
            write.point(folder / "latest", newer)
            write.remove(checkpoint)
        read.read_recipe(checkpoint)
        read.read_weights(checkpoint)
        return checkpoint

    assert read.reading(tmp_path / "run", replaced).name == "step-00000006"


def test_a_checkpoint_that_is_damaged_is_not_read_for_ever(recipe_of: Recipes, tmp_path: Path) -> None:
    train(recipe_of("training.steps=1"), tmp_path / "run")
    (read.find(tmp_path / "run") / "model.safetensors").unlink()
    with pytest.raises(Exception, match="missing"):
        read.reading(tmp_path / "run", read.read_weights)


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


@pytest.mark.parametrize(
    "place", ["thesis.tex", "notes/a.txt", "checkpoints/step-00000001-mine/a", "checkpoints/mine", "abandoned-1/mine",
              "checkpoints/step-00000001/mine.txt", "checkpoints/step-00000001/notes/a", ".git/config"],
)  # fmt: skip
def test_a_run_that_holds_more_is_not_overwritten(recipe_of: Recipes, tmp_path: Path, place: str) -> None:
    run = tmp_path / "run"
    train(recipe_of("training.steps=1"), run)
    mine = run / place
    mine.parent.mkdir(parents=True, exist_ok=True)
    mine.write_text("mine")
    with pytest.raises(UsageError, match="not part of a run, and --overwrite would delete it"):
        train(recipe_of("training.steps=1"), run, overwrite=True)
    assert mine.read_text() == "mine" and linked(run, "latest") == 1


def test_behind_a_link_the_whole_run_is_replaced(recipe_of: Recipes, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "disk")
    train(recipe_of("training.keep_last=9"), tmp_path / "run")
    train(recipe_of("training.steps=2"), tmp_path / "run", overwrite=True)
    assert (tmp_path / "run").is_symlink() and steps(tmp_path / "disk") == [2]
    assert [step for step, _ in losses(tmp_path / "disk")] == [1, 2]


def test_a_link_within_a_run_is_not_followed_into_what_it_names(recipe_of: Recipes, tmp_path: Path) -> None:
    train(recipe_of("training.steps=1"), tmp_path / "run")
    (tmp_path / "thesis").mkdir()
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    (tmp_path / "run" / "checkpoints").symlink_to(tmp_path / "thesis")
    with pytest.raises(UsageError, match="checkpoints: not part of a run"):
        train(recipe_of("training.steps=1"), tmp_path / "run", overwrite=True)


def test_weights_are_not_taken_from_the_folder_that_is_emptied(recipe_of: Recipes, tmp_path: Path) -> None:
    train(recipe_of("training.steps=1"), tmp_path / "run")
    for key in ("init_from", "teacher"):
        with pytest.raises(UsageError, match=rf"training\.{key}: .* is in .*, which --overwrite empties"):
            train(recipe_of(f"training.{key}={tmp_path / 'run'}"), tmp_path / "run", overwrite=True)
    assert linked(tmp_path / "run", "latest") == 1


def test_a_mistake_leaves_the_run_that_was_to_be_replaced(recipe_of: Recipes, tmp_path: Path) -> None:
    train(recipe_of("training.steps=1"), tmp_path / "run")
    with pytest.raises(UsageError):
        train(recipe_of("text.sequence_length=100000"), tmp_path / "run", overwrite=True)
    with pytest.raises(UsageError, match="Leave out one"):
        train(recipe_of(), tmp_path / "run", resume="auto", overwrite=True)
    assert linked(tmp_path / "run", "latest") == 1


# --- the end of a terminal


@pytest.mark.slow  # the test below closes a terminal, and test_signals.py sends SIGHUP
def test_a_terminal_that_closes_is_a_request_to_stop(tiny: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    child = lmlong("train", tiny, "--out", run, "training.steps=100000", "training.log_every=1")
    while not metrics(run):
        time.sleep(0.01)
    child.send_signal(signal.SIGHUP)
    _, errors = child.communicate(timeout=60)
    assert child.returncode == 129, errors
    assert linked(run, "latest") == losses(run)[-1][0]


IN_A_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # the terminal of this session
os.execv(sys.executable, [sys.executable, "-m", "lmlong", *sys.argv[1:]])
"""


def test_a_terminal_that_is_really_closed_leaves_a_checkpoint(tiny: Path, tmp_path: Path) -> None:
    """Whatever is written to it then fails: the progress bar, and what is said at the end."""
    run = tmp_path / "run"
    ours, its = pty.openpty()
    command = [sys.executable, "-c", IN_A_TERMINAL, "train", tiny, "--out", run, "training.steps=100000"]
    child = subprocess.Popen(command, stdin=its, stdout=its, stderr=its, start_new_session=True)
    os.close(its)
    try:
        while not metrics(run):
            os.read(ours, 1 << 16)
        os.close(ours)  # which has the kernel send SIGHUP
        assert child.wait(60) == 129
    finally:
        child.kill()
        child.wait()
    assert linked(run, "latest") == losses(run)[-1][0]


def test_a_run_under_nohup_goes_on(tiny: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with ignored(signal.SIGHUP):
        child = lmlong("train", tiny, "--out", run, "training.steps=12")
    while not metrics(run):
        time.sleep(0.001)
    child.send_signal(signal.SIGHUP)
    _, errors = child.communicate(timeout=60)
    assert child.returncode == 0, errors
    assert linked(run, "latest") == 12


def test_what_a_kill_left_to_prune_goes_when_the_run_goes_on(recipe_of: Recipes, tmp_path: Path) -> None:
    """Also where nothing is left to train, as after a kill between the last link and the pruning."""
    train(recipe_of(*OFTEN, "training.keep_last=9"), tmp_path / "run")
    train(recipe_of(*OFTEN, "training.keep_last=2"), tmp_path / "run", resume="auto")
    assert set(steps(tmp_path / "run")) == {11, 12, linked(tmp_path / "run", "best")}


# --- what is somebody's own


def test_a_checkpoint_taken_out_of_its_place_keeps_the_metrics_that_are_there(
    recipe_of: Recipes, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    train(recipe_of("training.steps=6"), run)
    (run / "checkpoints" / "step-00000006").rename(run / "checkpoints" / "keep")
    train(recipe_of("training.steps=8"), run, resume=str(run / "checkpoints" / "keep"))
    assert [step for step, _ in losses(run)] == list(range(1, 9))


@pytest.mark.parametrize("name", ["metrics.jsonl", "environment.json", "recipe.yaml", "tokenizer.model", ".lock"])
@pytest.mark.parametrize("how", ["auto", "other"])
def test_going_on_writes_over_nobodys_files(recipe_of: Recipes, tmp_path: Path, name: str, how: str) -> None:
    mine = tmp_path / "mine" / name
    mine.parent.mkdir()
    mine.write_text("mine")
    if how == "other":
        train(recipe_of("training.steps=1"), tmp_path / "other")
    with pytest.raises(UsageError, match=r"Choose (another )?--out"):
        train(recipe_of(), tmp_path / "mine", resume="auto" if how == "auto" else str(tmp_path / "other"))
    assert mine.read_text() == "mine"


def test_files_among_events_are_not_overwritten(recipe_of: Recipes, tmp_path: Path) -> None:
    train(recipe_of("training.steps=1", "training.loggers=[tensorboard]"), tmp_path / "run")
    (tmp_path / "run" / "tensorboard" / "thesis.tex").write_text("mine")
    with pytest.raises(UsageError, match=r"thesis\.tex: not part of a run"):
        train(recipe_of("training.steps=1"), tmp_path / "run", overwrite=True)
    (tmp_path / "run" / "tensorboard" / "thesis.tex").unlink()
    train(recipe_of("training.steps=1"), tmp_path / "run", overwrite=True)


def test_weights_whose_manifest_is_damaged_are_never_pruned(recipe_of: Recipes, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(recipe_of(*OFTEN, "training.steps=5", "training.keep_last=9"), run)
    manifest_of_two = run / "checkpoints" / "step-00000002" / "manifest.json"
    manifest_of_two.write_text(manifest_of_two.read_text().replace("validation", "valibation"))
    train(recipe_of(*OFTEN, "training.steps=6"), run, resume="auto")
    assert 2 in steps(run) and 3 not in steps(run)


@pytest.mark.parametrize("what", ["file", "link", "dangling link", "copy of another step"])
def test_what_is_in_the_way_of_a_checkpoint_is_moved_not_lost(recipe_of: Recipes, tmp_path: Path, what: str) -> None:
    run = tmp_path / "run"
    train(recipe_of("training.steps=4"), run)
    place = run / "checkpoints" / "step-00000008"
    if what == "file":
        place.write_text("mine")
    elif what == "copy of another step":
        shutil.copytree(run / "checkpoints" / "step-00000004", place)
    else:
        place.symlink_to("step-00000004" if what == "link" else "nowhere")
    train(recipe_of("training.keep_last=9"), run, resume="auto")
    moved = run / "checkpoints" / "step-00000008-moved-1"
    assert moved.is_symlink() or moved.exists()
    manifest.verify(place)
