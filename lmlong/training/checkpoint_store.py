"""The checkpoints of a run: which ones are kept, and which is the best."""

import math
from pathlib import Path
from typing import NamedTuple

from lmlong.checkpoint import manifest, write
from lmlong.checkpoint.location import best_of, checkpoints_in, read_manifest, step_of


class Best(NamedTuple):
    """The best validation of a run."""

    step: int
    loss: float


class CheckpointStore:
    """The checkpoints of a run."""

    def __init__(self, folder: Path, keep_last: int = 1, keep_every: int | None = None):
        self.folder, self.keep_last, self.keep_every = folder, keep_last, keep_every

    def all(self) -> list[Path]:
        """Return the checkpoints from the oldest to the newest."""
        return checkpoints_in(self.folder.parent)

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def save(self, contents: write.Contents) -> None:
        """Write a checkpoint, then remove those that need not be kept."""
        if contents.validation is not None and not math.isfinite(contents.validation):
            contents = contents._replace(validation=None)
        path = self.path(contents.step)
        write.write(path, contents)
        manifest.verify(path)
        self.prune()

    def best(self) -> Best | None:
        """Return the best validation of the checkpoints; None if there is none."""
        best = best_of(self.all())
        return Best(step_of(best[0]), best[1]) if best else None

    def prune(self) -> None:
        """Remove checkpoints that need not be kept; called only after the newest was verified.

        A checkpoint with an unreadable manifest is kept, since it may be the best.
        """
        checkpoints = self.all()
        best = best_of(checkpoints)
        kept = {*checkpoints[-self.keep_last :], *([best[0]] if best else [])}
        for path in checkpoints:
            by_step = self.keep_every and step_of(path) % self.keep_every == 0
            if path not in kept and not by_step and read_manifest(path):
                write.remove(path)
