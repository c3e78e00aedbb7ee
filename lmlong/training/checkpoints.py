"""When checkpoints are written, which are kept, and how Lightning writes and reads them through our own format."""

from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.plugins.io import CheckpointIO

from lmlong.checkpoint import manifest, read, write


class FolderIO(CheckpointIO):
    """Lightning's checkpoint as a folder: weights as safetensors, everything else as plain values."""

    def __init__(self, recipe: str, tokenizer: bytes):
        self.recipe, self.tokenizer = recipe, tokenizer

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        training = {key: value for key, value in checkpoint.items() if key != "state_dict"}
        write.write(Path(path), write.Contents(checkpoint["state_dict"], training, self.recipe, self.tokenizer))

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        return {**read.read_training(Path(path)), "state_dict": read.read_weights(Path(path))}

    def remove_checkpoint(self, path: Any) -> None:
        write.remove(Path(path))


class Shelf:
    """The checkpoints of a run: the newest and the best by validation under links of their own, and others kept."""

    def __init__(self, folder: Path, keep_last: int, keep_every: int | None):
        self.folder, self.keep_last, self.keep_every = folder, keep_last, keep_every
        self.best: float | None = None

    def save(self, trainer: Trainer, validated: float | None) -> None:
        """Write a checkpoint of the step just done, and what it was found to be worth, less being better; every rank
        calls this, for saving is a common work."""
        path = self.folder / f"step-{trainer.global_step:08d}"
        trainer.save_checkpoint(path)
        if not trainer.is_global_zero:
            return
        manifest.verify(path)
        write.point(self.folder / read.LATEST, path)
        if validated is not None and (self.best is None or validated < self.best):
            self.best = validated
            write.point(self.folder / read.BEST, path)
        self._prune()

    def _prune(self) -> None:
        """Remove those that need not be kept; called only after the newest was verified."""
        checkpoints = sorted(path for path in self.folder.glob("step-*"))
        kept = {(self.folder / name).resolve() for name in (read.LATEST, read.BEST)}
        kept |= {path.resolve() for path in checkpoints[-self.keep_last :]}
        for path in checkpoints:
            for_ever = self.keep_every and int(path.name.removeprefix("step-")) % self.keep_every == 0
            if path.resolve() not in kept and not for_ever:
                write.remove(path)
