"""Resume a run: choose the checkpoint, check the recipe, and keep one history of checkpoints in the run folder.

What a resumed run restores, by whom it is read, and where it is applied:

    tokenizer, weights and buffers       `prepare_resumed_run`        at once
    clock, first step, place in data     `prepare_resumed_run`        `TrainingModule`, `PreparedRun.first_step`
    history of checkpoints               `make_newest`                the run folder: later checkpoints are moved aside
    moments of optimizer and tables,     `training_state.read_state`  `training_state.restore`, before the first step
      gradient scaler, skipped steps,
      carried state, recent losses
    metrics                              `MetricsLog.cut_back`        the run folder: those of later steps are dropped
    best validation                      `CheckpointStore.best`       `TrainingCallback.on_train_start`
"""

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lmlong.checkpoint import manifest, read, write
from lmlong.checkpoint.location import checkpoints_in, step_of
from lmlong.data.hub import with_commits
from lmlong.errors import CheckpointError, UsageError
from lmlong.io.files import atomic_write
from lmlong.recipe import Recipe, Training
from lmlong.training.checkpoint_store import CheckpointStore
from lmlong.training.distributed import is_main_process, print_once
from lmlong.training.metrics_log import METRICS_FILE
from lmlong.training.prepare import PreparedRun, prepare_run
from lmlong.training.run_folder import ABANDONED, RECORDS
from lmlong.training.training_state import read_state

FIXED = (
    "seed",
    "objective",
    "text.",
    "model.",
    "training.carry_state",
    "training.state_passing",
    "training.init_from",
    "training.only_ngram",
    "training.teacher",
    "training.optimizer",
)
"""Options that determine weights, data order and random draws; all others may change during a run."""

DIVISION = ("devices", "nodes", "training.sequence_parallel", "training.batch_size", "training.accumulate")
"""Options that divide the sequences of a step among devices; they may change, but not the number of sequences."""

PATHS = ("text.sources", "text.validation.sources")
"""Options with paths of the text. They may change if the text does not: its hash is compared when training begins."""

RESOLVED = ("device", "training.precision")
"""Options whose `auto` is not a change: a run keeps the resolved value."""


def resume_point(folder: Path, resume: str) -> Path | None:
    """Return the checkpoint of --resume; `auto` is the newest undamaged one of the run, or None if there is none yet.

    Only the main process verifies digests, and moves damaged checkpoints aside before the others train.
    """
    if resume != "auto":
        checkpoint = read.find(resume)
        _verify(checkpoint)
        return checkpoint
    checkpoints = checkpoints_in(folder)
    for path in reversed(checkpoints):
        try:
            _verify(path)
            return path.resolve()
        except (CheckpointError, OSError) as error:
            print_once(f"skipped: {error}")
    if checkpoints:
        raise CheckpointError(f"{folder}: none of its checkpoints can be resumed, see above. Choose another --out.")
    if list(folder.glob("abandoned-*")):
        raise CheckpointError(
            f"{folder}: all checkpoints have been moved aside. Name one in abandoned-*/checkpoints by --resume."
        )
    return None


def _verify(checkpoint: Path) -> None:
    """Refuse a checkpoint that cannot be resumed from."""
    if manifest.read(checkpoint).files.keys() & {*manifest.FILES} == {*manifest.START}:
        raise UsageError(
            f"{checkpoint}: has weights, but no training state that this version reads: they were imported, or trained "
            f"by an earlier version. Start a run from them: training.init_from={checkpoint}, with another --out."
        )
    manifest.verify(checkpoint, digests=is_main_process())


def prepare_resumed_run(recipe: Recipe, checkpoint: Path) -> PreparedRun:
    """Return a run that resumes from a checkpoint chosen by `resume_point`."""
    old = read.read_recipe(checkpoint, verify=False)
    recipe = resumed_recipe(old, recipe)
    prepared = prepare_run(recipe, checkpoint, verify=False)
    state = read_state(checkpoint, prepared.model, prepared.recipe.training, prepared.source_hashes)
    about = manifest.read(checkpoint)
    before = 0 if about.trained_tokens is None else about.trained_tokens - state["step"] * old.tokens_per_step
    weights_hash = about.files[manifest.WEIGHTS]["sha256"]
    return prepared._replace(start=checkpoint, state=state, weights_hash=weights_hash, tokens_before=before)


def resumed_recipe(old: Recipe, new: Recipe) -> Recipe:
    """Return the recipe to resume with: the new one, with the old number of sequences per step and the old commits of
    data sets on the hub.

    Print all changes since the checkpoint, and refuse changes that would make it a different run.
    """
    training = _share_out(old, new)
    if training.optimizer == "auto":
        training = training.model_copy(update={"optimizer": old.training.optimizer})
    text = with_commits(new.text, old.text)
    if text.labels and old.text.labels and not text.labels.names:
        text = text.model_copy(update={"labels": text.labels.model_copy(update={"names": old.text.labels.names})})
    new = new.model_copy(update={"training": training, "text": text})
    passes_other_states = old.training.passes_states and _rows_at_once(old) != _rows_at_once(new)
    for key, before, now in changes(old.model_dump(), new.model_dump()):
        if key in RESOLVED and now == "auto":
            continue
        if key in PATHS and _weights(before) == _weights(now):
            print_once(f"changed since the checkpoint: {key}")
            continue
        if key.startswith(FIXED) or (key in DIVISION and passes_other_states):
            raise _different_run(key, f"was {before} in this run and is {now} now. Put it back")
        print_once(f"changed since the checkpoint: {key} from {before} to {now}")
    return new


def _rows_at_once(recipe: Recipe) -> tuple[int, int, int]:
    """Return how the sequences of a step are divided into rows that continue each other."""
    return recipe.batches_at_once, recipe.training.batch_size, recipe.training.accumulate


def _weights(sources: list[dict[str, Any]]) -> list[float]:
    """Return the weight of each source."""
    return [source["weight"] for source in sources]


def _share_out(old: Recipe, new: Recipe) -> Training:
    """Return the new options of training, with `accumulate` changed so that a different number of devices reads the
    same number of sequences per step."""
    before = old.sequences_per_step
    if before == new.sequences_per_step:
        return new.training
    changed = [key for key, _, _ in changes(old.model_dump(), new.model_dump()) if key in DIVISION]
    at_once = new.batches_at_once * new.training.batch_size
    if (
        new.batches_at_once == old.batches_at_once
        or new.training.accumulate != old.training.accumulate
        or before % at_once
    ):
        raise _different_run(
            changed[0],
            f"devices x nodes / sequence_parallel x batch_size x accumulate was {before} sequences a step in this run "
            f"and is {new.sequences_per_step} now. Make it {before} again",
        )
    return new.training.model_copy(update={"accumulate": before // at_once})


def _different_run(key: str, why: str) -> UsageError:
    remedy = "or begin another run by --out, with these weights by training.init_from."
    return UsageError(f"--resume: {key}: {why}, {remedy}")


def changes(old: dict[str, Any], new: dict[str, Any], section: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Iterate over the dotted keys whose values differ, with the old and new values."""
    for key in new:
        before, now = old.get(key), new[key]
        if isinstance(before, dict) and isinstance(now, dict):
            yield from changes(before, now, f"{section}{key}.")
        elif before != now:
            yield f"{section}{key}", before, now


def make_newest(folder: Path, checkpoint: Path, store: CheckpointStore) -> None:
    """Make the checkpoint to resume from the newest of the run, so that its checkpoints are one history.

    Later checkpoints are moved aside, not removed. A checkpoint of another run is copied, with the metrics up to it.
    Removals that a killed run left undone are completed.
    """
    store.folder.mkdir(parents=True, exist_ok=True)
    write.clean(store.folder)
    step = manifest.read(checkpoint).step
    if checkpoint.resolve() in [path.resolve() for path in store.all()]:
        _move_aside(folder, store, step)
    else:
        # the metrics up to it, unless the checkpoint was moved out of its run
        log = checkpoint.parents[1] / METRICS_FILE if checkpoint.parent.name == "checkpoints" else None
        metrics = log.read_text(encoding="utf-8", errors="replace") if log and log.is_file() else ""
        _move_aside(folder, store, -1)
        atomic_write(folder / METRICS_FILE, metrics)
        write.copy(checkpoint, store.path(step))
    store.prune()


def _move_aside(folder: Path, store: CheckpointStore, step: int) -> None:
    """Move the checkpoints after a step into a separate run folder, the newest first: if interrupted, the remaining
    ones are still the beginning of the history."""
    later = [path for path in store.all() if step_of(path) > step]
    if not later:
        return
    numbers = [int(name[1]) for path in folder.iterdir() if (name := ABANDONED.fullmatch(path.name))]
    abandoned = folder / f"abandoned-{max(numbers, default=0) + 1}"
    aside = CheckpointStore(abandoned / "checkpoints")
    aside.folder.mkdir(parents=True)
    for record in RECORDS:
        if (folder / record).is_file():
            shutil.copyfile(folder / record, abandoned / record)
    for path in reversed(later):
        shutil.move(path, aside.folder / path.name)  # copies if `checkpoints` is on another disk
    print(f"moved aside to {abandoned}: {', '.join(path.name for path in later)}", file=sys.stderr)
