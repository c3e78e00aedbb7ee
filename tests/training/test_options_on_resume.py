"""Every option of training either takes effect when a run goes on, or is refused there."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from lmlong.checkpoint import read
from lmlong.errors import UsageError
from lmlong.recipe import Recipe, Training
from lmlong.training.resume import resumed_recipe
from lmlong.training.run import train

from .conftest import metrics

Recipes = Callable[..., Recipe]

LEARNING = {
    "learning_rate": ["learning_rate=3e-2"],
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
}
"""What changes the losses; beside another option where it has no effect alone."""

BESIDE = {"decay_fraction": ["schedule=warmup-stable-decay"]}

FILES: dict[str, tuple[list[str], Callable[[Path], bool]]] = {
    "validate_every": (["validate_every=7"], lambda run: 7 in validated(run)),
    "validation_tokens": (["validate_every=7", "validation_tokens=64"], lambda run: validated(run)[7] <= 64),
    "final_validation_tokens": (
        ["validation_tokens=64", "final_validation_tokens=200"],
        lambda run: any("final_validation" in line for line in metrics(run)),
    ),
    "checkpoint_every": (["checkpoint_every=7", "keep_last=9"], lambda run: 7 in kept(run)),
    "keep_last": (["checkpoint_every=1", "keep_last=3"], lambda run: len(kept(run)) == 3),
    "keep_every": (["checkpoint_every=1", "keep_every=3"], lambda run: {6} <= kept(run)),
    "log_every": (
        ["log_every=5"],
        lambda run: [line["step"] for line in metrics(run) if "loss" in line][-2:] == [5, 8],
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

OF_A_TEACHER = {"teacher_of": "layers", "teacher_share": "0.25", "teacher_temperature": "2.0"}
"""What is refused beside a teacher."""

FROM_THE_RECIPE = {
    "minutes": "3",
    "strategy": "ddp",
    "deepspeed": "{stage: 3}",
    "compile": "true",
    "kernel": "torch",
    "segment": "16",
    "activation_checkpointing": "true",
    "on_nonfinite": "skip",
    "skips": "9",
}
"""What is read from the recipe of the resumed run as from that of a new one, and kept nowhere else."""


def validated(run: Path) -> dict[int, int]:
    return {line["step"]: line["validation"]["tokens"] for line in metrics(run) if "validation" in line}


def kept(run: Path) -> set[int]:
    return {int(path.name[5:]) for path in (run / "checkpoints").glob("step-*")}


def test_no_option_is_forgotten() -> None:
    assert {*LEARNING, *FILES, *REFUSED, *OF_A_TEACHER, *FROM_THE_RECIPE} == set(Training.model_fields)


@pytest.fixture(scope="module")
def four_steps(shared: Path, shared_recipe_of: Recipes) -> Path:
    train(shared_recipe_of("training.steps=4"), shared / "run")
    return shared / "run"


@pytest.fixture
def recipe_of(shared_recipe_of: Recipes) -> Recipes:
    return shared_recipe_of


@pytest.fixture
def begun(four_steps: Path, tmp_path: Path) -> Callable[[str], Path]:
    """Copies of a run of four steps."""
    return lambda name: Path(shutil.copytree(four_steps, tmp_path / name, symlinks=True))


def on(recipe_of: Recipes, run: Path, *options: str) -> list[float]:
    """The losses of a run that goes on with options changed."""
    train(recipe_of("training.steps=8", *(f"training.{option}" for option in options)), run, resume="auto")
    return [line["loss"] for line in metrics(run) if "loss" in line][4:8]


@pytest.mark.parametrize("name", LEARNING)
def test_what_is_learned_follows_from_the_options_of_now(recipe_of: Recipes, begun: Callable, name: str) -> None:
    usual = on(recipe_of, begun("usual"), *BESIDE.get(name, ()))
    changed = on(recipe_of, begun("changed"), *LEARNING[name])
    assert changed != usual[: len(changed)]


def test_a_changed_rate_is_that_of_a_run_that_always_had_it(recipe_of: Recipes, begun: Callable) -> None:
    """The rate of each line is the one that was learned by."""
    run = begun("changed")
    on(recipe_of, run, "learning_rate=3e-2", "schedule=constant")
    assert {line["learning_rate"] for line in metrics(run)[4:] if "loss" in line} == {3e-2}


@pytest.mark.parametrize("name", FILES)
def test_what_is_written_follows_from_the_options_of_now(recipe_of: Recipes, begun: Callable, name: str) -> None:
    options, shows = FILES[name]
    usual, changed = begun("usual"), begun("changed")
    on(recipe_of, usual)
    on(recipe_of, changed, *options)
    assert shows(changed) and not _shows(shows, usual)


def _shows(shows: Callable[[Path], bool], run: Path) -> bool:
    try:
        return shows(run)
    except KeyError:
        return False


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_make_another_run_is_refused(recipe_of: Recipes, begun: Callable, name: str) -> None:
    with pytest.raises(UsageError, match=f"--resume: training.{name}"):
        on(recipe_of, begun("changed"), f"{name}={REFUSED[name]}")


@pytest.mark.parametrize("name", OF_A_TEACHER)
def test_a_teacher_goes_on_teaching_the_same(recipe_of: Recipes, name: str) -> None:
    taught = ("training.optimizer=muon", "training.teacher=/nowhere")
    with pytest.raises(UsageError, match=f"--resume: training.{name}"):
        resumed_recipe(recipe_of(*taught), recipe_of(*taught, f"training.{name}={OF_A_TEACHER[name]}"))


@pytest.mark.parametrize("name", FROM_THE_RECIPE)
def test_all_else_is_taken_from_the_recipe(recipe_of: Recipes, begun: Callable, name: str) -> None:
    new = recipe_of("training.optimizer=muon", f"training.{name}={FROM_THE_RECIPE[name]}")
    old = read.read_recipe(read.find(begun("run")))
    assert getattr(new.training, name) != getattr(old.training, name)
    assert resumed_recipe(old, new) == new


def test_a_text_that_has_moved_is_the_same_text(
    recipe_of: Recipes, begun: Callable, shared: Path, tmp_path: Path
) -> None:
    run, usual = begun("moved"), on(recipe_of, begun("usual"))
    shutil.copyfile(shared / "book.txt", tmp_path / "moved.txt")
    source = f"{{kind: files, paths: [{tmp_path}/moved.txt]}}"
    train(recipe_of("training.steps=8", f"text.sources=[{source}]"), run, resume="auto")
    assert [line["loss"] for line in metrics(run) if "loss" in line][4:] == usual


def test_sources_may_not_be_weighted_anew(recipe_of: Recipes, begun: Callable, shared: Path) -> None:
    source = f"{{kind: files, paths: [{shared}/book.txt], weight: 2}}"
    with pytest.raises(UsageError, match=r"--resume: text\.sources"):
        train(recipe_of("training.steps=8", f"text.sources=[{source}]"), begun("run"), resume="auto")
