"""Going on with a run: what may change on the way, and what would make it another run."""

import csv
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from lmlong.checkpoint import manifest, read, write
from lmlong.errors import CheckpointError, UsageError
from lmlong.io import folder_manifest
from lmlong.io.folder_manifest import manifest_text
from lmlong.training.resume import changes, prepare_resumed_run, resume_point, resumed_recipe
from lmlong.training.run import train
from lmlong.training.training_state import random_states, restore_random_states

from .conftest import Recipes, assert_resumes_exactly, metrics, moments, same_tensors, weights


@pytest.fixture
def recipe_of(shared_recipe_of: Recipes) -> Recipes:
    return shared_recipe_of


@pytest.mark.parametrize(
    "change",
    ["model.width=64", "text.sequence_length=32", "text.tokenizer={kind: sentencepiece, vocabulary: 300}", "seed=1",
     "model.attention.decay=none"],
)  # fmt: skip
def test_a_change_that_makes_another_run_is_refused_by_name(recipe_of: Recipes, run: Path, change: str) -> None:
    before = metrics(run)
    key = change.partition("=")[0]
    with pytest.raises(UsageError, match=f"--resume: {key}"):
        train(recipe_of(change, "training.steps=8"), run, resume="auto")
    assert metrics(run) == before


def test_other_changes_are_reported(recipe_of: Recipes, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outcome = train(recipe_of("training.steps=6", "training.log_every=2"), run, resume="auto")
    assert outcome.step == 6
    reported = [line for line in capsys.readouterr().err.splitlines() if line.startswith("changed")]
    assert reported == [
        "changed since the checkpoint: training.steps from 4 to 6",
        "changed since the checkpoint: training.log_every from 1 to 2",
    ]


def test_changes_are_found_at_every_depth() -> None:
    old = {"a": 1, "b": {"c": [1], "d": {"e": None}}}
    new = {"a": 1, "b": {"c": [2], "d": {"e": 3}}, "f": 0}
    assert list(changes(old, new)) == [("b.c", [1], [2]), ("b.d.e", None, 3), ("f", None, 0)]


def test_a_text_that_has_changed_is_refused(recipe_of: Recipes, run: Path, shared: Path, tmp_path: Path) -> None:
    book = tmp_path / "book.txt"
    book.write_text((shared / "book.txt").read_text() + "and then some more " * 50)
    with pytest.raises(UsageError, match="the text has changed since the run began"):
        source = f"text.sources=[{{kind: files, paths: [{book}]}}]"
        train(recipe_of("training.steps=8", source), run, resume="auto")


def test_logs_with_and_without_a_resume_are_equal(recipe_of: Recipes, tmp_path: Path) -> None:
    """Metrics, validations and the rows of Lightning's loggers have the same steps and numbers, but for speeds."""
    run = tmp_path / "run"
    recipe = recipe_of("training.keep_last=5", "training.loggers=[csv]", "training.accumulate=2")
    train(recipe, run)
    before = [{name: value for name, value in line.items() if name != "tokens_per_second"} for line in metrics(run)]
    trained = weights(run)
    train(recipe, run, resume=str(run / "checkpoints" / "step-00000004"))
    after = [{name: value for name, value in line.items() if name != "tokens_per_second"} for line in metrics(run)]
    assert after == before and after[-1]["step"] == 12 and same_tensors(weights(run), trained)
    rows = []
    for folder in ("from-00000000", "from-00000004"):
        with (run / "csv" / folder / "metrics.csv").open(newline="") as file:
            rows.append([{**row, "tokens_per_second": ""} for row in csv.DictReader(file) if int(row["step"]) > 4])
    assert rows[0] == rows[1] and {int(row["step"]) for row in rows[1]} == set(range(5, 13))


def test_random_states_are_put_back_exactly() -> None:
    states = random_states()
    drawn = (random.random(), np.random.rand(3).tolist(), torch.rand(3).tolist())
    random.seed(5), np.random.seed(5), torch.manual_seed(5)
    restore_random_states(states)
    assert (random.random(), np.random.rand(3).tolist(), torch.rand(3).tolist()) == drawn


def test_a_run_resumes_on_another_number_of_gpus(
    recipe_of: Recipes, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A checkpoint of more GPUs than are visible (on most machines, none)."""
    checkpoint = read.find(run)
    state = read.read_training(checkpoint)
    here = torch.cuda.device_count()
    state |= {f"random.cuda.{number}": torch.zeros(16, dtype=torch.uint8) for number in range(here + 8)}
    write.save_training(state, checkpoint)
    (checkpoint / manifest.NAME).write_text(manifest_text(checkpoint, manifest.FORMAT, {"step": 4, "validation": None}))
    assert train(recipe_of("training.steps=6"), run, resume="auto").step == 6
    assert f"has those of {here + 8} GPUs and {here} are visible, {here} restored" in capsys.readouterr().err


@pytest.mark.parametrize(("saved", "gpus", "restored"), [(8, 4, [0, 1, 2, 3]), (4, 8, [0, 1, 2, 3]), (0, 4, [])])
def test_random_states_of_gpus_are_restored_as_far_as_there_are_gpus(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], saved: int, gpus: int, restored: list[int]
) -> None:
    """torch's own call is replaced, for it queues what no GPU is there to take."""
    given: dict[int, int] = {}
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: given.update({device: int(state[0])}))
    cuda = {f"random.cuda.{number}": torch.full((16,), number, dtype=torch.uint8) for number in range(saved)}
    restore_random_states({**random_states(), **cuda}, gpus)
    assert given == {number: number for number in restored}
    assert capsys.readouterr().err.count("\n") == 1


def test_each_optimizer_resumes_exactly_and_need_not_be_named_again(recipe_of: Recipes, tmp_path: Path) -> None:
    for optimizer, kind in (("muon", "momentum"), ("adamw", "exp_avg")):
        named = f"training.optimizer={optimizer}"
        assert_resumes_exactly(recipe_of, tmp_path / optimizer, named)
        assert f"optimizer.1.{kind}" in moments(read.find(tmp_path / optimizer / "whole"))
        assert resumed_recipe(recipe_of(named), recipe_of()).training.optimizer == optimizer


def test_a_run_from_before_there_was_a_choice_resumes_with_adamw(recipe_of: Recipes) -> None:
    assert resumed_recipe(recipe_of(), recipe_of()).training.optimizer == "adamw"
    with pytest.raises(UsageError, match=r"training\.optimizer: was adamw in this run and is muon now"):
        resumed_recipe(recipe_of(), recipe_of("training.optimizer=muon"))


@pytest.mark.parametrize(("rank", "times"), [("0", 1), ("1", 0)])
def test_changes_are_printed_by_one_process_of_all(
    recipe_of: Recipes, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], rank: str, times: int
) -> None:
    monkeypatch.setenv("LOCAL_RANK", rank)
    resumed_recipe(recipe_of(), recipe_of("training.learning_rate=1e-4"))
    assert capsys.readouterr().err.count("changed since the checkpoint: training.learning_rate") == times


def test_a_checkpoint_is_hashed_once_and_by_one_process(
    recipe_of: Recipes, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed, sha256 = [], folder_manifest.sha256
    monkeypatch.setattr(folder_manifest, "sha256", lambda path: [hashed.append(path), sha256(path)][1])
    train(recipe_of("training.steps=5"), run, resume="auto")
    resumed_from = run / "checkpoints" / "step-00000004"
    assert sorted(path.name for path in hashed if path.parent == resumed_from) == sorted(manifest.FILES)
    hashed.clear()
    monkeypatch.setenv("LOCAL_RANK", "1")
    checkpoint = resume_point(run, "auto")
    assert checkpoint is not None and prepare_resumed_run(recipe_of("training.steps=6"), checkpoint).first_step == 5
    assert not hashed


def test_each_process_validates_what_it_reads(recipe_of: Recipes, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that verify no digests too: here the digests are those of other files."""
    checkpoint = read.find(run)
    state = read.read_training(checkpoint)
    monkeypatch.setenv("LOCAL_RANK", "1")
    for part, value in (("step", -1), ("step", 3), ("optimizer.0.exp_avg", 1), ("carried.0", torch.tensor(np.nan))):
        write.save_training({**state, part: value}, checkpoint)
        with pytest.raises(CheckpointError):
            prepare_resumed_run(recipe_of("training.steps=6"), checkpoint)
    write.save_training(state, checkpoint)
    weights = read.read_weights(checkpoint)
    name = "embedding.weight"
    for changed in (weights[name][:-1].contiguous(), weights[name].int(), weights[name] * np.nan):
        save_file({**weights, name: changed}, checkpoint / manifest.WEIGHTS)
        with pytest.raises(CheckpointError):
            prepare_resumed_run(recipe_of("training.steps=6"), checkpoint)
