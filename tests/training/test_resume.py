"""Going on with a run: what may change on the way, and what would make it another run."""

import csv
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from lmlong.checkpoint import manifest, read
from lmlong.errors import CheckpointError, UsageError
from lmlong.io import folder_manifest
from lmlong.io.folder_manifest import manifest_text
from lmlong.recipe import Recipe
from lmlong.training.resume import changes, prepare_resumed_run, resume_point, resumed_recipe
from lmlong.training.run import train
from lmlong.training.training_state import random_states, restore_random_states

from .conftest import assert_resumes_exactly, metrics

Recipes = Callable[..., Recipe]


@pytest.mark.parametrize(
    "change",
    ["model.width=64", "text.sequence_length=32", "text.tokenizer={kind: sentencepiece, vocabulary: 300}",
     "seed=1", "training.batch_size=2", "training.accumulate=2", "model.attention.decay=none"],
)  # fmt: skip
def test_a_change_that_makes_another_run_is_refused_by_name(recipe_of: Recipes, tmp_path: Path, change: str) -> None:
    train(recipe_of("training.steps=4"), tmp_path / "run")
    before = (tmp_path / "run" / "metrics.jsonl").read_text()
    key = change.partition("=")[0]
    with pytest.raises(UsageError, match=f"--resume: {key}"):
        train(recipe_of(change, "training.steps=8"), tmp_path / "run", resume="auto")
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == before


def test_a_change_that_does_not_is_told(recipe_of: Recipes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(recipe_of("training.steps=4"), tmp_path / "run")
    outcome = train(recipe_of("training.steps=6", "training.log_every=2"), tmp_path / "run", resume="auto")
    assert outcome.step == 6
    told = [line for line in capsys.readouterr().err.splitlines() if line.startswith("changed")]
    assert told == [
        "changed since the checkpoint: training.steps from 4 to 6",
        "changed since the checkpoint: training.log_every from 1 to 2",
    ]


def test_changes_are_found_at_every_depth() -> None:
    old = {"a": 1, "b": {"c": [1], "d": {"e": None}}}
    new = {"a": 1, "b": {"c": [2], "d": {"e": 3}}, "f": 0}
    assert list(changes(old, new)) == [("b.c", [1], [2]), ("b.d.e", None, 3), ("f", None, 0)]


def test_a_text_that_has_changed_is_refused(recipe_of: Recipes, tmp_path: Path) -> None:
    train(recipe_of("training.steps=4"), tmp_path / "run")
    with (tmp_path / "book.txt").open("a") as book:
        book.write("and then some more " * 50)
    with pytest.raises(UsageError, match="the text has changed since the run began"):
        train(recipe_of("training.steps=8"), tmp_path / "run", resume="auto")


def test_an_explicit_path_is_gone_on_from_and_what_came_after_is_cut(recipe_of: Recipes, tmp_path: Path) -> None:
    keep = "training.keep_last=5"
    train(recipe_of(keep), tmp_path / "whole")
    train(recipe_of(keep), tmp_path / "again")
    first = tmp_path / "again" / "checkpoints" / "step-00000004"
    train(recipe_of(keep), tmp_path / "again", resume=str(first))
    assert (tmp_path / "again/metrics.jsonl").read_text().count("loss") == 12
    mine, other = (read.read_weights(read.find(tmp_path / name)) for name in ("again", "whole"))
    assert all(torch.equal(mine[name], other[name]) for name in other)


def test_logs_with_and_without_a_resume_are_equal(recipe_of: Recipes, tmp_path: Path) -> None:
    """Metrics, validations and the rows of Lightning's loggers have the same steps and numbers, but for speeds."""
    run = tmp_path / "run"
    recipe = recipe_of("training.keep_last=5", "training.loggers=[csv]", "training.accumulate=2")
    train(recipe, run)
    before = [{name: value for name, value in line.items() if name != "tokens_per_second"} for line in metrics(run)]
    train(recipe, run, resume=str(run / "checkpoints" / "step-00000004"))
    after = [{name: value for name, value in line.items() if name != "tokens_per_second"} for line in metrics(run)]
    assert after == before and after[-1]["step"] == 12
    rows = []
    for folder in ("from-00000000", "from-00000004"):
        with (run / "csv" / folder / "metrics.csv").open(newline="") as file:
            rows.append([{**row, "tokens_per_second": ""} for row in csv.DictReader(file) if int(row["step"]) > 4])
    assert rows[0] == rows[1] and {int(row["step"]) for row in rows[1]} == set(range(5, 13))


def test_a_damaged_checkpoint_named_by_its_path_is_refused(recipe_of: Recipes, tmp_path: Path) -> None:
    train(recipe_of("training.keep_last=5"), tmp_path / "run")
    bad = tmp_path / "run" / "checkpoints" / "step-00000012"
    data = (bad / "training.pt").read_bytes()
    (bad / "training.pt").write_bytes(data[:-1])
    with pytest.raises(CheckpointError, match=r"step-00000012/training\.pt: not what was saved"):
        train(recipe_of("training.steps=14"), tmp_path / "run", resume=str(bad))
    assert resume_point(tmp_path / "run", "auto") == bad.with_name("step-00000008")


def test_checkpoints_are_kept_as_asked(recipe_of: Recipes, tmp_path: Path) -> None:
    def kept(*options: str) -> list[int]:
        folder = tmp_path / ("-".join(options) or "default")
        train(recipe_of("training.checkpoint_every=1", "training.validate_every=100", *options), folder)
        return sorted(int(path.name[5:]) for path in (folder / "checkpoints").glob("step-*"))

    assert kept() == [12]
    assert kept("training.keep_last=3") == [10, 11, 12]
    assert kept("training.keep_every=5") == [5, 10, 12]


def test_random_states_are_put_back_exactly() -> None:
    states = random_states()
    drawn = (random.random(), np.random.rand(3).tolist(), torch.rand(3).tolist())
    random.seed(5), np.random.seed(5), torch.manual_seed(5)
    restore_random_states(states)
    assert (random.random(), np.random.rand(3).tolist(), torch.rand(3).tolist()) == drawn


@pytest.mark.parametrize("gpus", [1, 8])
def test_a_run_resumes_on_another_number_of_gpus(
    recipe_of: Recipes, tmp_path: Path, capsys: pytest.CaptureFixture[str], gpus: int
) -> None:
    """Checkpoints of 1 and of 8 GPUs, where another number of them is visible (on most machines, none)."""
    train(recipe_of("training.steps=4"), tmp_path / "run")
    checkpoint = read.find(tmp_path / "run")
    state = read.read_training(checkpoint)
    here = len(state["random"]["cuda"])
    state["random"]["cuda"] = [torch.zeros(16, dtype=torch.uint8) for _ in range(here + gpus)]
    torch.save(state, checkpoint / manifest.TRAINING)
    (checkpoint / manifest.NAME).write_text(manifest_text(checkpoint, manifest.FORMAT, {"step": 4, "validation": None}))
    assert train(recipe_of("training.steps=6"), tmp_path / "run", resume="auto").step == 6
    assert f"has those of {here + gpus} GPUs and {here} are visible, {here} restored" in capsys.readouterr().err


@pytest.mark.parametrize(("saved", "gpus", "restored"), [(8, 4, [0, 1, 2, 3]), (4, 8, [0, 1, 2, 3]), (0, 4, [])])
def test_random_states_of_gpus_are_restored_as_far_as_there_are_gpus(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], saved: int, gpus: int, restored: list[int]
) -> None:
    """torch's own call is replaced, for it queues what no GPU is there to take."""
    given: dict[int, int] = {}
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: given.update({device: int(state[0])}))
    cuda = [torch.full((16,), number, dtype=torch.uint8) for number in range(saved)]
    restore_random_states({**random_states(), "cuda": cuda}, gpus)
    assert given == {number: number for number in restored}
    assert capsys.readouterr().err.count("\n") == 1


def test_random_states_are_part_of_a_checkpoint(recipe_of: Recipes, tmp_path: Path) -> None:
    train(recipe_of("training.steps=4"), tmp_path / "run")
    state = read.read_training(read.find(tmp_path / "run"))
    assert set(state["random"]) == {"python", "numpy", "torch", "cuda"}
    assert len(state["random"]["python"]) == 625


def test_each_optimizer_resumes_exactly_and_need_not_be_named_again(recipe_of: Recipes, tmp_path: Path) -> None:
    for optimizer, moments in (("muon", "momentum"), ("adamw", "exp_avg")):
        named = f"training.optimizer={optimizer}"
        assert_resumes_exactly(recipe_of, tmp_path / optimizer, named)
        state = read.read_training(read.find(tmp_path / optimizer / "whole"))
        assert any(moments in kept for number, kept in state["optimizer"].items() if number)
        assert resumed_recipe(recipe_of(named), recipe_of()).training.optimizer == optimizer


def test_a_run_from_before_there_was_a_choice_goes_on_with_adamw(recipe_of: Recipes) -> None:
    assert resumed_recipe(recipe_of(), recipe_of()).training.optimizer == "adamw"
    with pytest.raises(UsageError, match=r"training\.optimizer: was adamw in this run and is muon now"):
        resumed_recipe(recipe_of(), recipe_of("training.optimizer=muon"))


@pytest.mark.parametrize(("rank", "times"), [("0", 1), ("1", 0)])
def test_what_changed_is_told_by_one_process_of_all(
    recipe_of: Callable[..., Recipe],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    rank: str,
    times: int,
) -> None:
    monkeypatch.setenv("LOCAL_RANK", rank)
    resumed_recipe(recipe_of(), recipe_of("training.learning_rate=1e-4"))
    assert capsys.readouterr().err.count("changed since the checkpoint: training.learning_rate") == times


def test_a_checkpoint_is_hashed_once_and_by_one_process(
    recipe_of: Recipes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(recipe_of("training.steps=4"), tmp_path / "run")
    hashed, sha256 = [], folder_manifest.sha256
    monkeypatch.setattr(folder_manifest, "sha256", lambda path: [hashed.append(path), sha256(path)][1])
    train(recipe_of("training.steps=5"), tmp_path / "run", resume="auto")
    resumed_from = tmp_path / "run" / "checkpoints" / "step-00000004"
    assert sorted(path.name for path in hashed if path.parent == resumed_from) == sorted(manifest.FILES)
    hashed.clear()
    monkeypatch.setenv("LOCAL_RANK", "1")
    checkpoint = resume_point(tmp_path / "run", "auto")
    assert checkpoint is not None and prepare_resumed_run(recipe_of("training.steps=6"), checkpoint).first_step == 5
    assert not hashed


def test_each_process_validates_what_it_reads(
    recipe_of: Recipes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that verify no digests too: here the digests are those of other files."""
    train(recipe_of("training.steps=4"), tmp_path / "run")
    checkpoint = read.find(tmp_path / "run")
    state = read.read_training(checkpoint)
    monkeypatch.setenv("LOCAL_RANK", "1")
    for part, value in (("step", -1), ("step", 3), ("optimizer", {0: {}}), ("carried", [torch.tensor(np.nan)])):
        torch.save({**state, part: value}, checkpoint / manifest.TRAINING)
        with pytest.raises(CheckpointError):
            prepare_resumed_run(recipe_of("training.steps=6"), checkpoint)
    torch.save(state, checkpoint / manifest.TRAINING)
    weights = read.read_weights(checkpoint)
    name = "embedding.weight"
    for changed in (weights[name][:-1].contiguous(), weights[name].int(), weights[name] * np.nan):
        save_file({**weights, name: changed}, checkpoint / manifest.WEIGHTS)
        with pytest.raises(CheckpointError):
            prepare_resumed_run(recipe_of("training.steps=6"), checkpoint)
