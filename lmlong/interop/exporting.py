"""Steps that all exports share: check and read a run, and write a folder atomically."""

import json
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from lmlong.checkpoint import manifest, read
from lmlong.checkpoint.environment import SourceText, read_environment, text_sources
from lmlong.data.tokenizers.base import Tokenizer
from lmlong.errors import UsageError
from lmlong.io.files import staged
from lmlong.io.system_errors import explain_errors
from lmlong.recipe import Recipe


class Exported(NamedTuple):
    """The model that was written."""

    folder: Path
    parameters: int
    architecture: str


class RunSource(NamedTuple):
    """A run to export."""

    recipe: Recipe
    tokenizer: Tokenizer
    weights: dict[str, Tensor]
    validation: float | None
    trained_tokens: int
    text: list[SourceText]

    @property
    def parameters(self) -> int:
        return sum(weight.numel() for weight in self.weights.values())


def open_export(run: str, folder: Path) -> RunSource:
    """Return a run to export into a folder. Raise UsageError if it cannot be exported."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder}: exists, and is not empty. Choose another --out.")
    return read.reading(run, _read)


def _read(checkpoint: Path) -> RunSource:
    recipe = read.read_recipe(checkpoint)
    if recipe.objective != "causal":
        what = "an encoder" if recipe.is_encoder else "a model of labels"
        raise UsageError(f"{what} cannot be exported: it does not predict the next token. Use a causal model.")
    tokenizer, weights = read.read_tokenizer(checkpoint), read.read_weights(checkpoint)
    read.check_size(checkpoint, recipe, tokenizer)
    validation, tokens = manifest.read(checkpoint).validation, read.trained_tokens(checkpoint)
    text = text_sources(read_environment(checkpoint), recipe)
    return RunSource(recipe, tokenizer, weights, validation, tokens, text)


def ends(tokenizer: Tokenizer) -> dict[str, int]:
    """Return the tokens that begin and end a document. Rows are padded with the end token."""
    return {"bos_token_id": tokenizer.bos, "eos_token_id": tokenizer.eos, "pad_token_id": tokenizer.eos}


def write_folder(folder: Path, files: dict[str, str], save: Callable[[Path], None]) -> None:
    """Write a folder of text files; `save` writes further files into it. All get the umask's mode, since some libraries
    write files that only their owner can read."""
    with staged_folder(folder, "Nothing was exported.") as unfinished:
        for name, text in files.items():
            (unfinished / name).write_text(text, encoding="utf-8")
        save(unfinished)
        mode = stat.S_IMODE((unfinished / next(iter(files))).stat().st_mode)
        for file in unfinished.iterdir():
            file.chmod(mode)


def as_json(values: dict[str, Any]) -> str:
    return json.dumps(values, indent=2) + "\n"


@contextmanager
def staged_folder(folder: Path, consequence: str) -> Iterator[Path]:
    """Yield an empty folder that becomes `folder` unless an error is raised. `folder` must be missing or empty. Reports
    of system errors end with `consequence`."""
    unfinished = staged(folder)
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        with explain_errors(folder, consequence):
            unfinished.mkdir(parents=True)
            yield unfinished
            if folder.exists():
                folder.rmdir()
            unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
