"""The checkpoints of a run: which ones are kept, and the links to the newest and the best."""

import math
from pathlib import Path
from typing import NamedTuple

from lmlong.checkpoint import manifest, write
from lmlong.checkpoint.location import BEST, LATEST, checkpoints_in, step_of
from lmlong.checkpoint.manifest import Manifest
from lmlong.errors import CheckpointError
from lmlong.io.links import follow_link, is_link


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
        self.link()
        self.prune()

    def best(self) -> Best | None:
        """Return the best validation of the checkpoints; None if there is none."""
        about = _manifest(follow_link(self.folder / BEST)) if is_link(self.folder / BEST) else None
        return None if about is None or about.validation is None else Best(about.step, about.validation)

    def link(self) -> None:
        """Point the links to the newest and the best."""
        checkpoints = self.all()
        manifests = {path: content for path in checkpoints if (content := _manifest(path))}
        losses = {path: each.validation for path, each in manifests.items() if each.validation is not None}
        best = min(losses, key=losses.__getitem__) if losses else None  # the oldest on ties
        for name, path in ((LATEST, checkpoints[-1] if checkpoints else None), (BEST, best)):
            link = self.folder / name
            if path:
                write.point(link, path)
            elif is_link(link):
                link.unlink()

    def prune(self) -> None:
        """Remove checkpoints that need not be kept; called only after the newest was verified and linked.

        A checkpoint with an unreadable manifest is kept, since it may be the best.
        """
        checkpoints = self.all()
        kept = {follow_link(self.folder / name).resolve() for name in (LATEST, BEST)}
        kept |= {path.resolve() for path in checkpoints[-self.keep_last :]}
        for path in checkpoints:
            by_step = self.keep_every and step_of(path) % self.keep_every == 0
            if path.resolve() not in kept and not by_step and _manifest(path):
                write.remove(path)


def _manifest(checkpoint: Path) -> Manifest | None:
    """Return the manifest of a checkpoint; None if it cannot be read."""
    try:
        return manifest.read(checkpoint)
    except (CheckpointError, OSError):
        return None
