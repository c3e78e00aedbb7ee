"""Conversion of a trained model to other attention: three runs, each from the weights of the previous run.

Each run is a process of `lmlong train`, with all its features: several devices, signals, exact resume.
"""

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from lmlong.attention.plugins import LOADED
from lmlong.checkpoint import read
from lmlong.data.data_module import CausalDataModule
from lmlong.data.token_dataset import prepare
from lmlong.errors import LmlongError, UsageError
from lmlong.io.signal_handlers import STOPPING, Handlers
from lmlong.recipe import Conversion, Recipe, Stage
from lmlong.recipe import file as recipe_file
from lmlong.training.dry_run import LIMIT, DryRun, dry_run
from lmlong.training.run_folder import check_folder

SHARED_OPTIONS = (
    "width",
    "layers",
    "tied_output",
    "embedding_scale",
    "ngram_embedding",
)
"""Options of `model` that must be the same in both models, since their weights are copied."""

OPTIONS_OF_LAYERS = ("heads", "kv_heads", "key_heads", "head_dim", "value_dim")
"""Those that must be the same in each layer."""


class StageRun(NamedTuple):
    """A run of a conversion."""

    name: str
    recipe: Recipe
    folder: Path


def stages(recipe: Recipe, teacher: str, folder: Path) -> list[StageRun]:
    """Return the runs that convert `teacher` into the model of a recipe; the last one is in `folder`. The
    recipe may leave out all others."""
    if recipe.training.sequence_parallel > 1:
        raise UsageError(
            "training.sequence_parallel: a conversion learns from a teacher, which reads whole rows. Leave it out, and "
            "set it in a run on longer rows with training.init_from."
        )
    conversion = recipe.conversion or Conversion()
    planned: list[StageRun] = []

    def add(name: str, stage: Stage, training: dict[str, Any]) -> None:
        training |= {"init_from": str(planned[-1].folder) if planned else teacher, "teacher": teacher} | _budget(stage)
        run = folder.with_name(f"{folder.name}-{name}")
        planned.append(StageRun(name, _from_teacher(recipe, training, stage), run))

    if conversion.layers:
        add("layers", conversion.layers, {"teacher_of": "layers"})
    if stage := conversion.predictions:
        add("predictions", stage, {"teacher_share": 1.0, "state_passing": stage.state_passing})
    start = str(planned[-1].folder) if planned else teacher
    return [*planned, StageRun("text", _changed(recipe, {"init_from": start}, {}), folder)]


def _budget(stage: Stage) -> dict[str, Any]:
    """Return the options of `training` that a stage sets."""
    rate = {} if stage.learning_rate is None else {"learning_rate": stage.learning_rate}
    return {"steps": stage.steps, "tokens": stage.tokens, "epochs": stage.epochs, "minutes": stage.minutes, **rate}


def _from_teacher(recipe: Recipe, training: dict[str, Any], stage: Stage) -> Recipe:
    """Return the recipe of a stage with a teacher, which reads each sequence from an empty state."""
    whole = recipe.text.sequence_length
    length = stage.sequence_length or (recipe.conversion and recipe.conversion.sequence_length) or whole
    not_with_a_teacher = {"carry_state": False, "state_passing": 0.0, "segment": None, "quantize": None}
    rows = {"batch_size": recipe.training.batch_size * (whole // length)}
    return _changed(recipe, {**not_with_a_teacher, **rows, **training}, {"sequence_length": length, "short_steps": 0})


def _changed(recipe: Recipe, training: dict[str, Any], text: dict[str, Any]) -> Recipe:
    values = recipe.model_dump()
    values["training"] |= training
    values["text"] |= text
    try:
        return recipe_file.with_absolute_paths(type(recipe)(**{**values, "conversion": None}))
    except LmlongError as error:
        raise UsageError(f"a stage of the conversion: {error}") from None


def check(recipe: Recipe, teacher: str) -> None:
    """Refuse a conversion that is impossible, before anything is trained."""
    if recipe.objective != "causal":
        raise UsageError("objective: only causal models can be converted. Use causal.")
    if recipe.training.teacher:
        raise UsageError("training.teacher: a conversion always learns from the converted run. Leave it out.")
    old = read.reading(teacher, read.read_recipe)
    if old.objective != "causal":
        why = f"has objective: {old.objective}, and predicts no next token to learn from"
        raise UsageError(f"{teacher}: {why}. Name a causal model.")
    for key in SHARED_OPTIONS:
        before, now = (getattr(model, key) for model in (old.model, recipe.model))
        if before != now:
            raise UsageError(
                f"model.{key}: {now} here and {before} in {teacher}. Leave it out: only attention may change."
            )
    for kinds in dict.fromkeys(zip(old.model.kinds, recipe.model.kinds, strict=True)):
        layers = [model.of_kind(kind) for model, kind in zip((old.model, recipe.model), kinds, strict=True)]
        for key in OPTIONS_OF_LAYERS:
            before, now = (getattr(model, key) for model in layers)
            if before != now:
                raise UsageError(
                    f"model.{key}: {now} in layers of kind {kinds[1]} here, and {before} in {teacher}. Leave it out: "
                    "only attention may change."
                )
    if old.model.attention == recipe.model.attention:
        raise UsageError(
            f"model.attention: {teacher} has the same attention, so there is nothing to convert. Choose another."
        )


def check_folders(planned: list[StageRun]) -> None:
    """Refuse to begin a conversion in folders that already hold one."""
    for stage in planned:
        check_folder(stage.folder, stage.recipe, None, False)


def check_text(teacher: str, planned: list[StageRun]) -> None:
    """Tokenize the text; refuse a text that is too short for any stage or has too few rows for its sources."""
    print(f"reading the text with the tokenizer of {teacher}", file=sys.stderr, flush=True)
    tokenizer = read.reading(teacher, read.read_tokenizer)
    for stage in planned:
        CausalDataModule(stage.recipe, prepare(stage.recipe.text, tokenizer)).training()


def dry_runs(planned: list[StageRun]) -> Iterator[tuple[str, DryRun]]:
    """Iterate over the names of stages and what they take. Each begins from the weights of the old model."""
    teacher = planned[0].recipe.training.init_from
    for number, stage in enumerate(planned, 1):
        print(f"stage {number} of {len(planned)}: {stage.name}", file=sys.stderr, flush=True)
        yield stage.name, dry_run(_changed(stage.recipe, {"init_from": teacher}, {}), LIMIT / len(planned))


def train_stages(planned: list[StageRun], overwrite: bool) -> int:
    """Train or resume each run; return the exit status of the first that fails, else 0."""
    for number, stage in enumerate(planned, 1):
        print(f"stage {number} of {len(planned)}: {stage.name}, in {stage.folder}", file=sys.stderr, flush=True)
        if status := _train(stage, overwrite):
            return status
    return 0


def _train(stage: StageRun, overwrite: bool) -> int:
    """Train a run in another process. Only its progress is shown: standard output is for the result of the conversion.

    The process has its own session, because Ctrl-C in a terminal would otherwise reach it twice. Stop signals of this
    process are passed on to it, and it saves before it ends.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"{stage.name}.yaml"
        file.write_text(recipe_file.dump(stage.recipe), encoding="utf-8")
        words = [sys.executable, "-m", "lmlong", "train", str(file), "--out", str(stage.folder)]
        words += [word for plugin in LOADED for word in ("--plugin", plugin)]
        if stage.folder.is_dir():
            words += ["--overwrite"] if overwrite else ["--resume", "auto"]
        nothing = subprocess.DEVNULL
        with (
            subprocess.Popen(words, stdin=nothing, stdout=nothing, start_new_session=True) as child,
            Handlers(STOPPING, lambda number, frame: child.send_signal(number)),
        ):
            status = child.wait()
    return 128 - status if status < 0 else status
