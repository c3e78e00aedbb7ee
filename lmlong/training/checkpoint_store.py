"""The checkpoints of a run: which are kept, and how Lightning writes and reads them in our own format."""

import math
import re
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.plugins.io import CheckpointIO

from lmlong.checkpoint import manifest, read, write
from lmlong.checkpoint.location import BEST, LATEST
from lmlong.errors import CheckpointError
from lmlong.io.links import follow_link, is_link
from lmlong.training.state import from_lightning, to_lightning

NAME = re.compile(r"step-(\d{8,})")
"""The names of checkpoints; anything else beside them belongs to the user, and is left alone."""


class FolderIO(CheckpointIO):
    """Lightning's checkpoint as a folder: weights as safetensors, the training state as plain values."""

    def __init__(self, recipe: str, tokenizer: bytes, state: dict[str, Any] | None = None):
        self.recipe, self.tokenizer = recipe, tokenizer
        self.state = state  # of training, to resume from; released once it is loaded

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        training = from_lightning(checkpoint)
        write.write(
            Path(path),
            write.Contents(
                checkpoint["state_dict"], training, self.recipe, self.tokenizer, training["step"], **storage_options
            ),
        )

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        assert self.state is not None
        state, self.state = self.state, None
        return {**to_lightning(state), "state_dict": read.read_weights(Path(path))}

    def remove_checkpoint(self, path: Any) -> None:
        write.remove(Path(path))


class CheckpointStore:
    """The checkpoints of a run, one history: links beside them name the newest and the best."""

    def __init__(self, folder: Path, keep_last: int = 1, keep_every: int | None = None):
        self.folder, self.keep_last, self.keep_every = folder, keep_last, keep_every

    def all(self) -> list[Path]:
        """Return the checkpoints from the oldest to the newest."""
        steps = {path: step for path in self.folder.glob("step-*") if (step := _step(path)) is not None}
        return sorted(steps, key=steps.__getitem__)

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def save(self, trainer: Trainer, validated: float | None, trained_tokens: int | None = None) -> None:
        """Write a checkpoint of the step just done, with its validation metric, less is better, and the tokens trained
        on; every rank calls this, since all ranks save together."""
        path = self.path(trainer.global_step)
        worth = validated if validated is not None and math.isfinite(validated) else None
        trainer.save_checkpoint(path, storage_options={"validation": worth, "trained_tokens": trained_tokens})
        if not trainer.is_global_zero:
            return
        manifest.verify(path)
        self.link()
        self.prune()

    def link(self) -> None:
        """Point the links to the newest and the best."""
        worth = {path: value for path in self.all() if (value := _validation(path)) is not None}
        best = min(worth, key=worth.__getitem__) if worth else None  # the first of equals
        for name, path in ((LATEST, next(reversed(self.all()), None)), (BEST, best)):
            link = self.folder / name
            if path:
                write.point(link, path)
            elif is_link(link):
                link.unlink()

    def prune(self) -> None:
        """Remove checkpoints that need not be kept; called only after the newest was verified and linked."""
        there = self.all()
        kept = {follow_link(self.folder / name).resolve() for name in (LATEST, BEST)}
        kept |= {path.resolve() for path in there[-self.keep_last :]}
        for path in there:
            for_ever = self.keep_every and int(path.name.removeprefix("step-")) % self.keep_every == 0
            if path.resolve() not in kept and not for_ever and _is_readable(path):
                write.remove(path)


def _is_readable(path: Path) -> bool:
    """Return whether a checkpoint's manifest is readable; if not, it may be the best, and is not removed."""
    try:
        manifest.read(path)
        return True
    except (CheckpointError, OSError):
        return False


def _step(path: Path) -> int | None:
    """Return the step in the name of a checkpoint; None for one of another step, or for what only looks like one."""
    name = NAME.fullmatch(path.name)
    if not name or path.is_symlink() or not path.is_dir():
        return None
    try:
        return int(name[1]) if manifest.read(path).step == int(name[1]) else None
    except (CheckpointError, OSError):
        return int(name[1])  # damaged, which is reported when a run would resume from it


def _validation(checkpoint: Path) -> float | None:
    """Return the validation metric of a checkpoint; None where it cannot be read."""
    try:
        return manifest.read(checkpoint).validation
    except (CheckpointError, OSError):
        return None
