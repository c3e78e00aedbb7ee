"""Every option of training either takes effect when a run resumes, or is refused there."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from lmlong.checkpoint import read
from lmlong.errors import UsageError
from lmlong.recipe import Training
from lmlong.training.resume import resumed_recipe
from lmlong.training.run import train

from .conftest import Recipes, logged_steps, losses, metrics

LEARNING = {
    "learning_rate": ["learning_rate=3e-2", "schedule=constant"],
    "schedule": ["schedule=constant"],
    "warmup_steps": ["warmup_steps=6"],
    "decay_fraction": ["schedule=warmup-stable-decay", "decay_fraction=0.9"],
    "final_learning_rate": ["final_learning_rate=0.9"],
    "steps": ["steps=40"],
    "tokens": ["tokens=1400"],
    "weight_decay": ["weight_decay=9.0"],
    "beta1": ["beta1=0.2"],
    "beta2": ["beta2=0.2"],
    "clip": ["clip=1e-3"],
    "precision": ["precision=bf16"],
    "learn": ["learn=1.0"],
    "quantize": ["quantize=int4"],
}
"""What changes the losses; beside another option where it has no effect alone."""

BESIDE = {"decay_fraction": ["schedule=warmup-stable-decay"]}

FILES: dict[str, tuple[list[str], Callable[[Path], bool]]] = {
    "validate_every": (["validate_every=7"], lambda run: 7 in validated(run)),
    "validation_tokens": (["validate_every=7", "validation_tokens=64"], lambda run: validated(run).get(7, 99) <= 64),
    "final_validation_tokens": (
        ["validation_tokens=64", "final_validation_tokens=200"],
        lambda run: any("final_validation" in line for line in metrics(run)),
    ),
    "checkpoint_every": (["checkpoint_every=7", "keep_last=9"], lambda run: 7 in kept(run)),
    "keep_last": (["checkpoint_every=1", "keep_last=3"], lambda run: len(kept(run)) == 3),
    "keep_every": (["checkpoint_every=1", "keep_every=3"], lambda run: {6} <= kept(run)),
    "log_every": (
        ["log_every=5"],
        lambda run: logged_steps(run)[-2:] == [5, 8],
    ),
    "sample_tokens": (["sample_tokens=2"], lambda run: any("sample" in line for line in metrics(run))),
    "loggers": (["loggers=[tensorboard]"], lambda run: (run / "tensorboard").is_dir()),
}
"""What changes what is written."""

REFUSED = {
    "carry_state": "true",
    "init_from": "/nowhere",
    "state_passing": "0.5",
    "batch_size": "2",
    "accumulate": "3",
    "optimizer": "adamw",
    "teacher": "/nowhere",
}

OF_A_TEACHER = {
    "teacher_of": "layers",
    "teacher_share": "0.25",
    "teacher_temperature": "2.0",
}
"""What is refused beside a teacher."""

FROM_THE_RECIPE = {
    "minutes": "3",
    "epochs": "3",
    "early_stopping": "false",
    "clock": "process",
    "strategy": "ddp",
    "deepspeed": "{stage: 3}",
    "compile": "true",
    "kernel": "torch",
    "segment": "16",
    "activation_checkpointing": "true",
    "on_nonfinite": "skip",
    "skips": "9",
    "sequence_parallel": "2",
}
"""What is read from the recipe of the resumed run as from that of a new one, and kept nowhere else."""


def validated(run: Path) -> dict[int, int]:
    return {line["step"]: line["validation"]["tokens"] for line in metrics(run) if "validation" in line}


def kept(run: Path) -> set[int]:
    return {int(path.name[5:]) for path in (run / "checkpoints").glob("step-*")}


def test_no_option_is_forgotten() -> None:
    elsewhere = {"only_ngram"}  # in test_added_heads.py
    assert {*LEARNING, *FILES, *REFUSED, *OF_A_TEACHER, *FROM_THE_RECIPE} | elsewhere == set(Training.model_fields)


@pytest.fixture
def recipe_of(shared_recipe_of: Recipes) -> Recipes:
    return shared_recipe_of


def resume(recipe_of: Recipes, run: Path, *options: str) -> list[float]:
    """Resume a run with changed options, and return the losses since."""
    train(recipe_of("training.steps=8", *(f"training.{option}" for option in options)), run, resume="auto")
    return losses(run)[4:8]


@pytest.fixture(scope="module")
def usual(four_steps: Path, shared: Path, shared_recipe_of: Recipes) -> Path:
    """That run, resumed with the same options."""
    run = Path(shutil.copytree(four_steps, shared / "usual", symlinks=True))
    resume(shared_recipe_of, run)
    return run


@pytest.mark.parametrize("name", LEARNING)
def test_what_is_learned_follows_from_the_present_options(
    recipe_of: Recipes, run: Path, usual: Path, name: str
) -> None:
    if name in BESIDE:
        usual = Path(shutil.copytree(run, run.with_name("usual"), symlinks=True))
        resume(recipe_of, usual, *BESIDE[name])
    changed = resume(recipe_of, run, *LEARNING[name])
    assert changed != losses(usual)[4 : 4 + len(changed)]
    if name == "learning_rate":
        assert {line["learning_rate"] for line in metrics(run)[4:] if "loss" in line} == {3e-2}


@pytest.mark.parametrize("name", FILES)
def test_what_is_written_follows_from_the_present_options(
    recipe_of: Recipes, run: Path, usual: Path, name: str
) -> None:
    options, shows = FILES[name]
    resume(recipe_of, run, *options)
    assert shows(run) and not shows(usual)


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_make_another_run_is_refused(recipe_of: Recipes, run: Path, name: str) -> None:
    with pytest.raises(UsageError, match=f"--resume: training.{name}"):
        resume(recipe_of, run, f"{name}={REFUSED[name]}")


@pytest.mark.parametrize("name", OF_A_TEACHER)
def test_the_teaching_stays_the_same(recipe_of: Recipes, name: str) -> None:
    taught = ("training.optimizer=muon", "training.teacher=/nowhere")
    with pytest.raises(UsageError, match=f"--resume: training.{name}"):
        resumed_recipe(recipe_of(*taught), recipe_of(*taught, f"training.{name}={OF_A_TEACHER[name]}"))


@pytest.mark.parametrize("name", FROM_THE_RECIPE)
def test_all_else_is_taken_from_the_recipe(recipe_of: Recipes, run: Path, name: str) -> None:
    devices = ["devices=2"] if name == "sequence_parallel" else []
    new = recipe_of("training.optimizer=muon", f"training.{name}={FROM_THE_RECIPE[name]}", *devices)
    old = read.read_recipe(read.find(run))
    assert getattr(new.training, name) != getattr(old.training, name)
    assert resumed_recipe(old, new) == new


def test_a_text_that_has_moved_is_the_same_text(
    recipe_of: Recipes, run: Path, usual: Path, shared: Path, tmp_path: Path
) -> None:
    shutil.copyfile(shared / "book.txt", tmp_path / "moved.txt")
    source = f"{{kind: files, paths: [{tmp_path}/moved.txt]}}"
    train(recipe_of("training.steps=8", f"text.sources=[{source}]"), run, resume="auto")
    assert losses(run) == losses(usual)


def test_sources_may_not_be_weighted_anew(recipe_of: Recipes, run: Path, shared: Path) -> None:
    source = f"{{kind: files, paths: [{shared}/book.txt], weight: 2}}"
    with pytest.raises(UsageError, match=r"--resume: text\.sources"):
        train(recipe_of("training.steps=8", f"text.sources=[{source}]"), run, resume="auto")
