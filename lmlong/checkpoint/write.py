"""Writing a checkpoint: beside its place, flushed to disk, manifest last, then renamed into place."""

import os
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor

from lmlong.checkpoint import manifest

WEIGHTS, TRAINING, RECIPE, TOKENIZER = "model.safetensors", "training.pt", "recipe.yaml", "tokenizer.model"


class Contents(NamedTuple):
    """All that a checkpoint holds."""

    weights: dict[str, Tensor]
    training: dict[str, Any]  # tensors and plain values only: it is read back with weights_only
    recipe: str
    tokenizer: bytes


def write(folder: Path, contents: Contents) -> None:
    """Write a checkpoint so that, whenever the machine stops, `folder` is absent or complete."""
    staged = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(staged, ignore_errors=True)
    staged.mkdir(parents=True)
    try:
        save_file({name: tensor.contiguous() for name, tensor in contents.weights.items()}, staged / WEIGHTS)
        torch.save(contents.training, staged / TRAINING)
        (staged / RECIPE).write_text(contents.recipe, encoding="utf-8")
        (staged / TOKENIZER).write_bytes(contents.tokenizer)
        for path in staged.iterdir():
            flush(path)
        (staged / manifest.NAME).write_text(manifest.make(staged), encoding="utf-8")
        flush(staged / manifest.NAME)
        flush(staged)
        if folder.exists():
            shutil.rmtree(folder)
        staged.rename(folder)
        flush(folder.parent)
    except BaseException:
        shutil.rmtree(staged, ignore_errors=True)
        raise


def point(link: Path, folder: Path) -> None:
    """Let a link beside the checkpoints name one of them; it never names none in between."""
    new = link.with_name(f".{link.name}.partial")
    new.unlink(missing_ok=True)
    new.symlink_to(folder.name)
    new.replace(link)
    flush(link.parent)


def flush(path: Path) -> None:
    """Have the disk hold what was written to a file or a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
