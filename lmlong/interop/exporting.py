"""What every export of a run does: what is refused, what is read, and a folder that is whole or not there at all."""

import json
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from lmlong.checkpoint import manifest, read
from lmlong.data.tokenizers.base import Tokenizer
from lmlong.errors import UsageError
from lmlong.io.system_errors import explain_errors
from lmlong.model.build import build
from lmlong.recipe import Recipe
from lmlong.recipe.kinds import plugins_needed


class Exported(NamedTuple):
    """What was written."""

    folder: Path
    parameters: int
    architecture: str


class Source(NamedTuple):
    """A run that goes out."""

    recipe: Recipe
    tokenizer: Tokenizer
    weights: dict[str, Tensor]
    validation: float | None
    trained_tokens: int


def open_run(run: str, folder: Path) -> Source:
    """Return what is read of a run that goes out into a folder, if it can."""
    _check_free(folder)
    return read.reading(run, _read)


def _read(checkpoint: Path) -> Source:
    recipe = read.read_recipe(checkpoint)
    _check(recipe)
    tokenizer, weights = read.read_tokenizer(checkpoint), read.read_weights(checkpoint)
    read.check_size(checkpoint, recipe, lambda recipe: build(recipe, tokenizer.vocabulary))
    validation, tokens = manifest.read(checkpoint).validation, read.trained_tokens(checkpoint)
    return Source(recipe, tokenizer, weights, validation, tokens)


def _check(chosen: Recipe) -> None:
    """Refuse what no export can hold."""
    if chosen.objective != "causal":
        raise UsageError("an encoder predicts no next token, and this export is for those. Use a causal model.")
    if chosen.model.downsample:
        raise UsageError("model.downsample: an hourglass is not exported. Use a model whose layers read every token.")
    if plugins := plugins_needed(chosen.model.attention.model_dump()):
        raise UsageError(f"model.attention: {plugins[0]} is a plug-in, whose code stays outside. Use a kind of lmlong.")


def _check_free(folder: Path) -> None:
    """Refuse a folder that holds anything."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder}: exists, and is not empty. Choose another --out.")


def ends(tokenizer: Tokenizer) -> dict[str, int]:
    """Return what begins and ends a document; rows are padded with its end."""
    return {"bos_token_id": tokenizer.bos, "eos_token_id": tokenizer.eos, "pad_token_id": tokenizer.eos}


def write_folder(folder: Path, files: dict[str, str], save: Callable[[Path], None]) -> None:
    """Write a folder of text files and of what `save` writes to the folder that it is given, all with the mode that the
    umask gives: some libraries write files that only their owner may read, and an export is there to be shared."""
    staged = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(staged, ignore_errors=True)
    try:
        with explain_errors(folder, "Nothing was exported."):
            staged.mkdir(parents=True)
            for name, text in files.items():
                (staged / name).write_text(text, encoding="utf-8")
            save(staged)
            usual = stat.S_IMODE((staged / next(iter(files))).stat().st_mode)
            for file in staged.iterdir():
                file.chmod(usual)
            if folder.exists():
                folder.rmdir()
            staged.rename(folder)
    finally:
        shutil.rmtree(staged, ignore_errors=True)


def as_json(values: dict[str, Any]) -> str:
    return json.dumps(values, indent=2) + "\n"
