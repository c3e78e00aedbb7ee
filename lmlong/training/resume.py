"""Resuming a run: from which checkpoint, and whether the recipe is still of the same run."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lmlong.checkpoint import manifest, read
from lmlong.errors import CheckpointError, UsageError
from lmlong.recipe import Recipe
from lmlong.training.checkpoint_store import CheckpointStore
from lmlong.training.distributed import tell

FIXED = (
    "seed",
    "objective",
    "text.",
    "model.",
    "training.carry_state",
    "training.state_passing",
    "training.init_from",
    "training.teacher",
    "training.optimizer",
)
"""Options that weights, data order and draws depend on; all others may change during a run."""

SHARES = ("devices", "nodes", "training.batch_size", "training.accumulate")
"""How the sequences of a step are divided: this may change, but not their number."""

WHERE = ("text.sources", "text.validation.sources")
"""Paths of the text, which may change as long as the text does not: its tokens are compared when training begins."""

LEFT_TO_THE_MACHINE = ("device", "training.precision")
"""Options where `auto` is no change: a run keeps the resolved value."""


def resume_point(folder: Path, resume: str) -> Path | None:
    """Return the checkpoint of --resume: `auto` is the newest of the run that verifies, or none before the first."""
    if resume != "auto":
        checkpoint = read.find(resume)
        manifest.verify(checkpoint)
        return checkpoint
    checkpoints = CheckpointStore(folder / "checkpoints").all()
    if checkpoints and manifest.TRAINING not in manifest.read(checkpoints[-1]).files:
        raise UsageError(
            f"{folder}: holds imported weights, and no training to resume. Start one: training.init_from={folder}."
        )
    for path in reversed(checkpoints):
        try:
            manifest.verify(path)
            return path.resolve()
        except (CheckpointError, OSError) as error:
            tell(f"passed over: {error}")
    if checkpoints:
        raise CheckpointError(
            f"{folder}: none of its checkpoints can be gone on from, see above. Choose another --out."
        )
    if list(folder.glob("abandoned-*")):
        raise CheckpointError(
            f"{folder}: has no checkpoint but those moved aside. Name one of abandoned-*/checkpoints by --resume."
        )
    return None


def same_run(old: Recipe, new: Recipe) -> Recipe:
    """Return the recipe to resume with: the new one, with as many sequences a step. Print what has changed since the
    checkpoint, and refuse changes that would make it another run."""
    old = _with_optimizer(old, "adamw")
    new = _with_optimizer(_share_out(old, new), old.training.optimizer)
    for key, before, now in changes(old.model_dump(), new.model_dump()):
        if key in LEFT_TO_THE_MACHINE and now == "auto":
            continue
        if key in WHERE and _weights(before) == _weights(now):
            tell(f"changed since the checkpoint: {key}")
            continue
        if key.startswith(FIXED) or (key in SHARES and old.training.passes_states):
            raise _another_run(key, f"was {before} in this run and is {now} now. Put it back")
        tell(f"changed since the checkpoint: {key} from {before} to {now}")
    return new


def _with_optimizer(recipe: Recipe, optimizer: str) -> Recipe:
    """Return the recipe with this optimizer for `auto`: a run keeps its own, and one that began before there was a
    choice has AdamW."""
    if recipe.training.optimizer != "auto":
        return recipe
    return recipe.model_copy(update={"training": recipe.training.model_copy(update={"optimizer": optimizer})})


def _weights(sources: list[dict[str, Any]]) -> list[float]:
    """Return the weight of each source."""
    return [source["weight"] for source in sources]


def _share_out(old: Recipe, new: Recipe) -> Recipe:
    """Return the recipe with `accumulate` changed so that another number of devices has as many sequences a step."""
    before = old.sequences_per_step
    if before == new.sequences_per_step:
        return new
    changed = [key for key, _, _ in changes(old.model_dump(), new.model_dump()) if key in SHARES]
    at_once = new.processes * new.training.batch_size
    if new.processes == old.processes or new.training.accumulate != old.training.accumulate or before % at_once:
        raise _another_run(
            changed[0],
            f"devices x nodes x batch_size x accumulate was {before} sequences a step in this run and is "
            f"{new.sequences_per_step} now. Make it {before} again",
        )
    training = new.training.model_copy(update={"accumulate": before // at_once})
    return new.model_copy(update={"training": training})


def _another_run(key: str, why: str) -> UsageError:
    remedy = "or begin another run by --out; training.init_from takes the weights along."
    return UsageError(f"--resume: {key}: {why}, {remedy}")


def changes(old: dict[str, Any], new: dict[str, Any], section: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Iterate over the dotted keys whose values differ, with both values."""
    for key in new:
        before, now = old.get(key), new[key]
        if isinstance(before, dict) and isinstance(now, dict):
            yield from changes(before, now, f"{section}{key}.")
        elif before != now:
            yield f"{section}{key}", before, now
