"""Resuming a run: every option either takes effect or is refused, and what else may change on the way."""

from collections.abc import Callable
from pathlib import Path

import pytest

from lmlong.checkpoint import manifest, read
from lmlong.errors import UsageError
from lmlong.io import folder_manifest
from lmlong.recipe import Training
from lmlong.training.prepare import prepare_new_run
from lmlong.training.resume import prepare_resumed_run, resume_point, resumed_recipe
from lmlong.training.run import train

from ..data.hub_server import NAME, URL, connect, forget, serving
from .conftest import Recipes, checkpoint_at, copied, kept_steps, logged_steps, losses, metrics

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
    "quantize": ["quantize=int4"],
}
"""What changes the losses; beside another option where it has no effect alone."""

BESIDE = {"decay_fraction": ["schedule=warmup-stable-decay"]}

USUAL = {"learning_rate", "weight_decay", "beta2", "precision", "quantize"}
"""Of these, one of each way by which an option reaches a step."""

WRITTEN: dict[str, Callable[[Path], bool]] = {
    "validate_every": lambda run: 7 in validated(run),
    "validation_tokens": lambda run: validated(run).get(7, 99) <= 64,
    "final_validation_tokens": lambda run: any("final_validation" in line for line in metrics(run)),
    "checkpoint_every": lambda run: 7 in kept_steps(run),
    "keep_last": lambda run: {6, 7, 8} <= {*kept_steps(run)},
    "keep_every": lambda run: 5 in kept_steps(run),
    "log_every": lambda run: logged_steps(run)[-2:] == [5, 8],
    "sample_tokens": lambda run: any("sample" in line for line in metrics(run)),
    "loggers": lambda run: (run / "csv").is_dir(),
}
"""What shows that an option of what is written has taken effect."""

WRITING = (
    *("training.validate_every=7", "training.validation_tokens=64", "training.final_validation_tokens=200"),
    *("training.checkpoint_every=1", "training.keep_last=3", "training.keep_every=5", "training.log_every=5"),
    *("training.sample_tokens=2", "training.loggers=[csv]"),
)

TAUGHT = "training.teacher=/nowhere"

REFUSED: dict[str, tuple[str, ...]] = {
    "seed=1": (),
    "objective=masked": (),
    "model.width=64": (),
    "model.attention.decay=none": (),
    "text.sequence_length=32": (),
    "text.tokenizer={kind: sentencepiece, vocabulary: 300}": (),
    "text.sources=[{kind: files, paths: [book.txt], weight: 2}]": (),
    "text.masking.share=0.3": ("objective=masked",),
    "training.carry_state=true": (),
    "training.init_from=/nowhere": (),
    "training.state_passing=0.5": (),
    "training.batch_size=2": (),
    "training.accumulate=3": (),
    "training.optimizer=adamw": (),
    "training.only_ngram=true": (
        *("model.attention.kind=softmax", "model.convolution=0"),
        *("model.add_ngram=[1]", "model.attention.ngram.buckets=64"),
    ),
    TAUGHT: (),
    "training.teacher_of=layers": (TAUGHT,),
    "training.teacher_share=0.25": (TAUGHT,),
    "training.teacher_temperature=2.0": (TAUGHT,),
}
"""What would make another run, and what the run has beside it."""

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


def test_every_option_is_in_a_table() -> None:
    refused = {override.partition("=")[0].removeprefix("training.") for override in REFUSED if "training" in override}
    assert {*LEARNING, *WRITTEN, *refused, *FROM_THE_RECIPE} == set(Training.model_fields)


def resume(recipe_of: Recipes, run: Path, *options: str) -> list[float]:
    """Resume a run with changed options, and return the losses since."""
    train(recipe_of("training.steps=8", *(f"training.{option}" for option in options)), run, resume="auto")
    return losses(run)[4:8]


@pytest.fixture(scope="module")
def usual(four_steps: Path, cache: Path, recipe_of: Recipes, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of four steps, resumed with the same options."""
    run = copied(four_steps, tmp_path_factory.mktemp("usual") / "run")
    resume(recipe_of, run)
    return run


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in USUAL else pytest.mark.slow) for name in LEARNING]
)
def test_new_options_of_learning_take_effect(recipe_of: Recipes, run: Path, usual: Path, name: str) -> None:
    if name in BESIDE:
        usual = copied(run, run.with_name("usual"))
        resume(recipe_of, usual, *BESIDE[name])
    changed = resume(recipe_of, run, *LEARNING[name])
    assert changed != losses(usual)[4 : 4 + len(changed)]
    if name == "learning_rate":
        assert {line["learning_rate"] for line in metrics(run)[4:] if "loss" in line} == {3e-2}


def test_new_options_of_output_take_effect(
    recipe_of: Recipes, run: Path, usual: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(recipe_of("training.steps=8", *WRITING), run, resume="auto")
    assert [name for name, shows in WRITTEN.items() if not shows(run) or shows(usual)] == []
    assert kept_steps(run) == [5, 6, 7, 8]
    reported = [line for line in capsys.readouterr().err.splitlines() if line.startswith("changed")]
    assert len(reported) == 1 + len(WRITING)
    assert "changed since the checkpoint: training.steps from 4 to 8" in reported


@pytest.mark.parametrize("change", REFUSED)
def test_change_of_the_run_is_refused(recipe_of: Recipes, change: str) -> None:
    before = ("training.optimizer=muon", *REFUSED[change])
    with pytest.raises(UsageError, match=f"--resume: {change.partition('=')[0]}.*was .* in this run and is .* now"):
        resumed_recipe(recipe_of(*before), recipe_of(*before, change))


def test_other_options_are_those_of_the_new_recipe(recipe_of: Recipes, four_steps: Path) -> None:
    options = {**LEARNING, **{name: [f"{name}={value}"] for name, value in FROM_THE_RECIPE.items()}}
    old = read.read_recipe(read.find(four_steps))
    for name, changed in options.items():
        devices = ["devices=2"] if name == "sequence_parallel" else []
        new = recipe_of("training.optimizer=muon", *(f"training.{option}" for option in changed), *devices)
        assert getattr(new.training, name) != getattr(old.training, name)
        assert resumed_recipe(old, new) == new


def test_optimizer_is_that_of_the_run(recipe_of: Recipes) -> None:
    for optimizer in ("muon", "adamw"):
        old = recipe_of(f"training.optimizer={optimizer}")
        assert resumed_recipe(old, recipe_of()).training.optimizer == optimizer


def test_moved_text_is_read_and_changed_text_is_refused(
    recipe_of: Recipes, run: Path, usual: Path, tiny: Path, tmp_path: Path
) -> None:
    book = tmp_path / "moved.txt"
    book.write_text(tiny.with_name("book.txt").read_text() + "and then some more " * 50)
    moved = recipe_of("training.steps=8", f"text.sources=[{{kind: files, paths: [{book}]}}]")
    with pytest.raises(UsageError, match="the text has changed since the run began"):
        train(moved, run, resume="auto")
    book.write_text(tiny.with_name("book.txt").read_text())
    train(moved, run, resume="auto")
    assert losses(run) == losses(usual)


def test_changes_are_printed_by_one_process(
    recipe_of: Recipes, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank, printed in (("0", "changed since the checkpoint: training.clip from 1.0 to 2.0\n"), ("1", "")):
        monkeypatch.setenv("LOCAL_RANK", rank)
        resumed_recipe(recipe_of(), recipe_of("training.clip=2.0"))
        assert capsys.readouterr().err == printed


def test_checkpoint_is_hashed_once(recipe_of: Recipes, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed, sha256 = [], folder_manifest.sha256
    monkeypatch.setattr(folder_manifest, "sha256", lambda path: hashed.append(path) or sha256(path))
    train(recipe_of("training.steps=5"), run, resume="auto")
    resumed_from = checkpoint_at(run, 4)
    assert sorted(path.name for path in hashed if path.parent == resumed_from) == sorted(manifest.FILES)
    hashed.clear()
    monkeypatch.setenv("LOCAL_RANK", "1")
    checkpoint = resume_point(run, "auto")
    assert checkpoint is not None and prepare_resumed_run(recipe_of("training.steps=6"), checkpoint).first_step == 5
    assert not hashed


def test_resumed_run_reads_the_same_commit_of_the_hub(
    tiny: Path,
    recipe_of: Recipes,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    new = recipe_of(f"text.sources=[{{kind: files, paths: [{URL}/data]}}]")
    with serving() as hub:
        connect(hub.url, tmp_path / "hf", monkeypatch)
        commit = hub.repositories[NAME].commit({"data/book.txt": tiny.with_name("book.txt").read_bytes()})
        old = prepare_new_run(new).recipe
        assert old.text.sources[0].paths == [f"{URL}@{commit}/data"]
        hub.repositories[NAME].commit({"data/book.txt": b"another book " * 900})
        forget(monkeypatch)
        assert resumed_recipe(old, new).text == old.text
    assert "text.sources" not in capsys.readouterr().err
