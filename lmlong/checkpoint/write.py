"""Writing a checkpoint: files in a temporary folder are flushed to disk, the manifest last, then the folder is
renamed."""

import errno
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lmlong.checkpoint.location import BEST, LATEST, LEFT_FOLDER
from lmlong.checkpoint.manifest import FORMAT, NAME, RECIPE, TOKENIZER, TRAINING_TENSORS, TRAINING_VALUES, WEIGHTS, read
from lmlong.errors import CheckpointError, LmlongError
from lmlong.io.files import fsync
from lmlong.io.folder_manifest import seal
from lmlong.io.system_errors import explain_errors

NAMES = {
    torch.int64: "I64",
    torch.float64: "F64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int16: "I16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""The names of dtypes in safetensors, in the order in which it writes them."""


class Deferred(NamedTuple):
    """A tensor that is computed when it is written, so that only one of many takes memory at a time."""

    shape: torch.Size
    dtype: torch.dtype
    compute: Callable[[], Tensor]


class Contents(NamedTuple):
    """The contents of a checkpoint."""

    weights: Mapping[str, Tensor | Deferred]
    training: Mapping[str, Any]  # tensors, and plain values that JSON can hold
    recipe: str
    tokenizer: bytes
    step: int = 0  # optimizer steps taken
    validation: float | None = None  # validation metric of the weights, lower is better
    trained_tokens: int | None = None  # including those of earlier runs that it began from

    def tensors(self) -> Iterator[Tensor | Deferred]:
        """Iterate over all tensors in the order in which they are written."""
        yield from _in_file_order(self.weights).values()
        yield from _in_file_order(_tensors(self.training)).values()

    def gather(self) -> None:
        """Compute what is deferred without writing it, where that takes all ranks and another one writes."""
        for tensor in self.tensors():
            if isinstance(tensor, Deferred):
                tensor.compute()


def write(folder: Path, contents: Contents) -> None:
    """Write a checkpoint so that `folder` is absent or complete even if the machine stops."""
    with explain_errors(folder, "Fix that, and resume with --resume auto."), _staged(folder) as staged:
        try:
            _check_space(staged, contents)
            _fill(staged, contents)
            _move_aside(folder, contents.step)
        except Exception as error:
            _check_space(staged, contents, error)
            raise


def copy(checkpoint: Path, folder: Path) -> None:
    """Copy a checkpoint so that `folder` is absent or complete even if the machine stops."""
    with _staged(folder) as staged:
        shutil.copytree(checkpoint, staged, copy_function=shutil.copyfile, dirs_exist_ok=True)
        for path in (*staged.iterdir(), staged):
            fsync(path)


@contextmanager
def _staged(folder: Path) -> Iterator[Path]:
    """Create a temporary folder that replaces `folder` at the end, unless an error is raised."""
    staged = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(staged, ignore_errors=True)
    staged.mkdir(parents=True)
    try:
        yield staged
        remove(folder)
        staged.rename(folder)
        fsync(folder.parent)
    finally:
        shutil.rmtree(staged, ignore_errors=True)


Forms = Mapping[str, tuple[torch.Size, torch.dtype]]
"""The shape and dtype of each tensor of a file."""


def write_imported(folder: Path, forms: Forms, weights: Iterable[Tensor], recipe: str, tokenizer: bytes) -> None:
    """Write a checkpoint without a training state, from weights that arrive one at a time."""
    folder.mkdir()
    need = sum(shape.numel() * dtype.itemsize for shape, dtype in forms.values()) + len(tokenizer)
    free = shutil.disk_usage(folder).free
    if need > free:
        raise LmlongError(
            f"{folder.parent}: needs {need:,} bytes, {need - free:,} more than are free. Free some space."
        )
    save_in_turn(forms, weights, folder / WEIGHTS)
    (folder / RECIPE).write_bytes(recipe.encode())
    (folder / TOKENIZER).write_bytes(tokenizer)
    seal(folder, FORMAT, {"step": 0, "validation": None, "trained_tokens": 0})


def save_in_turn(
    forms: Forms, tensors: Iterable[Tensor], path: Path, separators: Any = None, about: dict[str, str] | None = None
) -> None:
    """Write a safetensors file from tensors that arrive one at a time, in the order of `forms`. `separators` are those
    of the JSON header, `about` its further texts."""
    header: dict[str, Any] = {} if about is None else {"__metadata__": about}
    begin = 0
    for name, (shape, dtype) in forms.items():
        end = begin + shape.numel() * dtype.itemsize
        header[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header, separators=separators, ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        expected = iter(forms.values())
        for tensor in tensors:
            assert (tensor.shape, tensor.dtype) == next(expected)
            numbers = tensor.detach().cpu().flatten()
            if numbers.stride() != (1,):  # as of one number, or of a column, whose bytes cannot be viewed
                numbers = numbers.clone(memory_format=torch.contiguous_format)
            file.write(numbers.view(torch.uint8).numpy().data)
            del tensor  # before the next one is computed


def save_one_at_a_time(
    tensors: Mapping[str, Tensor | Deferred], path: Path, about: dict[str, str] | None = None
) -> None:
    """Write the file that safetensors writes, but compute deferred tensors one at a time."""
    ordered = _in_file_order(tensors)
    forms = {name: (tensor.shape, tensor.dtype) for name, tensor in ordered.items()}
    computed = (tensor.compute() if isinstance(tensor, Deferred) else tensor for tensor in ordered.values())
    save_in_turn(forms, computed, path, (",", ":"), about)


def _in_file_order(tensors: Mapping[str, Tensor | Deferred]) -> dict[str, Tensor | Deferred]:
    """Return tensors in the order in which safetensors writes them: by dtype, then by name."""
    dtypes = list(NAMES)
    return dict(sorted(tensors.items(), key=lambda item: (dtypes.index(item[1].dtype), item[0])))


def save_training(state: Mapping[str, Any], folder: Path) -> None:
    """Write a training state: tensors as safetensors, computed one at a time, and all other values as JSON."""
    tensors = _tensors(state)
    save_one_at_a_time(tensors, folder / TRAINING_TENSORS)
    values = {name: value for name, value in state.items() if name not in tensors}
    (folder / TRAINING_VALUES).write_bytes(json.dumps(values).encode())


def _tensors(state: Mapping[str, Any]) -> dict[str, Tensor | Deferred]:
    return {name: value for name, value in state.items() if isinstance(value, Tensor | Deferred)}


def _move_aside(folder: Path, step: int) -> None:
    """Move aside anything that has the checkpoint's name but is not a checkpoint of this step: it belongs to the
    user."""
    if not os.path.lexists(folder):
        return
    try:
        is_checkpoint = not folder.is_symlink() and read(folder).step == step
    except CheckpointError:
        is_checkpoint = folder.is_dir() and (folder / NAME).exists()  # a damaged one
    if not is_checkpoint:
        free = next(path for n in count(1) if not os.path.lexists(path := folder.with_name(f"{folder.name}-moved-{n}")))
        folder.rename(free)
        print(f"{folder}: moved to {free.name}, since a checkpoint needs its name", file=sys.stderr)


def _fill(staged: Path, contents: Contents) -> None:
    """Write all files of a checkpoint, the manifest last."""
    save_one_at_a_time(contents.weights, staged / WEIGHTS)
    save_training(contents.training, staged)
    (staged / RECIPE).write_bytes(contents.recipe.encode())
    (staged / TOKENIZER).write_bytes(contents.tokenizer)
    about = {name: getattr(contents, name) for name in ("step", "validation", "trained_tokens")}
    seal(staged, FORMAT, about)


def _check_space(staged: Path, contents: Contents, cause: Exception | None = None) -> None:
    """Refuse to write, or explain a failed write, if the checkpoint is larger than the free disk space."""
    need = size(contents)
    free = shutil.disk_usage(staged).free + sum(path.stat().st_size for path in staged.iterdir())
    if need <= free and not (isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT)):
        return
    missing = f"{need - free:,} more than are free" if need > free else "the disk or a quota is full"
    raise LmlongError(
        f"{staged.parent}: a checkpoint needs {need:,} bytes, {missing}. Free some space and resume with --resume auto."
    ) from cause


def size(contents: Contents) -> int:
    """Return the size of a checkpoint in bytes, with an allowance for names and lists."""
    data = sum(tensor.shape.numel() * tensor.dtype.itemsize + 512 for tensor in contents.tensors())
    return data + len(contents.recipe) + len(contents.tokenizer) + (1 << 16)


def remove(folder: Path) -> None:
    """Remove a checkpoint so that it is complete or absent under its name even if the machine stops."""
    if folder.exists():
        doomed = folder.with_name(f".{folder.name}.removed")
        shutil.rmtree(doomed, ignore_errors=True)
        folder.rename(doomed)
        shutil.rmtree(doomed)


def clean(checkpoints: Path) -> None:
    """Remove the leftovers of a process that was stopped while it wrote or removed a checkpoint, and the links to
    checkpoints that earlier versions made."""
    for path in checkpoints.glob(".*"):
        if LEFT_FOLDER.fullmatch(path.name) and path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
    for link in (checkpoints / LATEST, checkpoints / BEST):
        if link.is_symlink():
            link.unlink()
