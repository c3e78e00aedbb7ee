"""The conversion of a trained model into one with other attention: three runs, each from the weights of the one before.

Every run is a process of its own, `lmlong train`, with all its features: several devices, signals, exact resume.
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
from lmlong.io.signal_handlers import Handlers
from lmlong.recipe import Conversion, Recipe, Stage
from lmlong.recipe import file as recipe_file
from lmlong.training.plan import make_plan
from lmlong.training.run_folder import check_folder
from lmlong.training.signals import STOPPING

SAME = ("width", "layers", "heads", "kv_heads", "head_dim", "value_dim", "tied_output", "embedding_scale")
"""What the weights that are copied must agree in."""


class StageRun(NamedTuple):
    """A run of a conversion."""

    name: str
    recipe: Recipe
    folder: Path


def stages(recipe: Recipe, teacher: str, folder: Path) -> list[StageRun]:
    """Return the runs by which a model like `teacher` becomes that of a recipe, which is in `folder` at the end."""
    conversion = recipe.conversion or Conversion()
    layers, predictions = (folder.with_name(f"{folder.name}-{name}") for name in ("layers", "predictions"))
    by_layer = {"init_from": teacher, "teacher": teacher, "teacher_of": "layers"} | _budget(conversion.layers)
    by_output = {"init_from": str(layers), "teacher": teacher, "teacher_share": 1.0} | _budget(conversion.predictions)
    return [
        StageRun("layers", _from_teacher(recipe, by_layer), layers),
        StageRun("predictions", _from_teacher(recipe, by_output), predictions),
        StageRun("text", _changed(recipe, {"init_from": str(predictions)}, {}), folder),
    ]


def _budget(stage: Stage) -> dict[str, Any]:
    """Return the options of `training` that a stage sets."""
    rate = {} if stage.learning_rate is None else {"learning_rate": stage.learning_rate}
    return {"steps": stage.steps, "tokens": stage.tokens, "minutes": stage.minutes, **rate}


def _from_teacher(recipe: Recipe, training: dict[str, Any]) -> Recipe:
    """Return the recipe of a stage with a teacher, who reads each sequence from an empty state."""
    whole = recipe.text.sequence_length
    length = (recipe.conversion and recipe.conversion.sequence_length) or whole
    alone = {"carry_state": False, "state_passing": 0.0, "segment": None}
    rows = {"batch_size": recipe.training.batch_size * (whole // length)}
    return _changed(recipe, {**alone, **rows, **training}, {"sequence_length": length})


def _changed(recipe: Recipe, training: dict[str, Any], text: dict[str, Any]) -> Recipe:
    values = recipe.model_dump()
    values["training"] |= training
    values["text"] |= text
    try:
        return recipe_file.with_absolute_paths(type(recipe)(**{**values, "conversion": None}))
    except LmlongError as error:
        raise UsageError(f"a stage of the conversion: {error}") from None


def samples_file(folder: Path) -> Path:
    """Return the file of the text that the old model writes."""
    return folder.with_name(f"{folder.name}-samples.jsonl")


def joined_file(folder: Path) -> Path:
    """Return the file of that text as one document, without the starts of its documents."""
    return samples_file(folder).with_suffix(".txt")


def on_samples(planned: list[StageRun]) -> list[StageRun]:
    """Return the runs with that text. The last one, in sequences longer than any document, reads all of them as one
    too: without those that begin, it would forget how texts begin."""
    folder = planned[-1].folder
    samples, joined = (
        {"kind": "files", "paths": [str(file.absolute())]} for file in (samples_file(folder), joined_file(folder))
    )
    sources = [[samples]] * (len(planned) - 1) + [[samples, joined]]
    return [
        stage._replace(recipe=_changed(stage.recipe, {}, {"sources": each}))
        for stage, each in zip(planned, sources, strict=True)
    ]


def check(recipe: Recipe, teacher: str) -> None:
    """Refuse what cannot be converted, before anything is trained."""
    if recipe.objective != "causal":
        raise UsageError("objective: an encoder has no state to make constant. Use causal.")
    if recipe.training.teacher:
        raise UsageError("training.teacher: the teacher of a conversion is the run itself. Leave it out.")
    old = read.reading(teacher, read.read_recipe)
    for key in SAME:
        before, now = (getattr(model, key) for model in (old.model, recipe.model))
        if before != now:
            raise UsageError(
                f"model.{key}: {now} here and {before} in {teacher}. Leave it out: attention alone changes."
            )
    if old.model.attention == recipe.model.attention:
        raise UsageError(f"model.attention: {teacher} has the same, so there is nothing to convert. Choose another.")


def check_folders(planned: list[StageRun]) -> None:
    """Refuse to begin a conversion where one has begun."""
    for stage in planned:
        check_folder(stage.folder, stage.recipe, None, False)
    if (samples := samples_file(planned[-1].folder)).exists():
        raise UsageError(f"{samples}: exists. Continue it by --resume, replace it by --overwrite, or choose --out.")


def check_text(teacher: str, planned: list[StageRun]) -> None:
    """Turn the text into tokens, and refuse one that is too short for any stage, or too few rows for its sources."""
    print(f"reading the text with the tokenizer of {teacher}", file=sys.stderr, flush=True)
    tokenizer = read.reading(teacher, read.read_tokenizer)
    for stage in planned:
        CausalDataModule(stage.recipe, prepare(stage.recipe.text, tokenizer)).training()


def plan(planned: list[StageRun]) -> Iterator[str]:
    """Iterate over the plans of stages, profiled by short steps; weights of stages to come are not needed for that."""
    for number, stage in enumerate(planned, 1):
        print(f"stage {number} of {len(planned)}: {stage.name}, profiled by short steps", file=sys.stderr, flush=True)
        yield f"{stage.name}\n{make_plan(stage.recipe).text()}"


def train_stages(planned: list[StageRun], overwrite: bool) -> int:
    """Train or resume each run; return the exit status of the first that stopped, else 0."""
    for number, stage in enumerate(planned, 1):
        print(f"stage {number} of {len(planned)}: {stage.name}, in {stage.folder}", file=sys.stderr, flush=True)
        if status := _train(stage, overwrite):
            return status
    return 0


def _train(stage: StageRun, overwrite: bool) -> int:
    """Train a run in a process whose progress alone is shown: standard output is for the result of the conversion.

    The process is in a session of its own, because Ctrl-C in a terminal would otherwise reach it twice: what would stop
    this process is passed on to it, and it saves before it ends.
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
