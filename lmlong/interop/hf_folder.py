"""Folders as transformers writes them: config.json, weights as safetensors, tokenizer.json."""

from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lmlong.checkpoint.write import NAMES
from lmlong.data.tokenizers import huggingface_file
from lmlong.errors import CheckpointError
from lmlong.interop.llama import ARCHITECTURE, LlamaSource, vocabulary_of
from lmlong.interop.llama_config import Architecture, llama_config
from lmlong.io.checked import Checked, checked, shown
from lmlong.io.files import parse_json

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
LONGEST_NAME = 200
"""Characters of the name of a file."""
DTYPES = {name: dtype for dtype, name in NAMES.items()}


class Index(Checked):
    """The file in which each weight is stored."""

    weight_map: Annotated[dict[str, str], Field(min_length=1)]


def open_folder(folder: Path) -> LlamaSource:
    """Return the model of a folder."""
    path = folder / "config.json"
    values = _json(path)
    about = checked(Architecture, path, values)
    if (kinds := about.architectures or [about.model_type]) != [ARCHITECTURE]:
        raise CheckpointError(
            f"{path}: architectures is {shown(kinds)}; {ARCHITECTURE} alone is known. Use another model."
        )
    config = llama_config(path, values)
    files = _files(folder)
    opened = ExitStack()
    where: dict[str, Any] = {}
    for file in files:
        try:
            handle = opened.enter_context(safe_open(file, "pt"))
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file}: no safetensors file, or damaged ({error}). Fetch it again.") from None
        where |= dict.fromkeys(handle.keys(), handle)
    tied = config.tie_word_embeddings
    slices = {name: handle.get_slice(name) for name, handle in where.items() if not _follows(name, tied)}
    shapes = {name: tuple(slice.get_shape()) for name, slice in slices.items()}
    dtypes = {slices[name].get_dtype() for name in shapes}
    if strange := sorted(dtypes - DTYPES.keys()):
        raise CheckpointError(f"{folder}: has weights of type {strange[0]}; those of {', '.join(DTYPES)} are read.")
    dtype = DTYPES[dtypes.pop()] if len(dtypes) == 1 else torch.float32

    def read(name: str) -> Tensor:
        return where[name].get_tensor(name)

    def tokenizer() -> bytes:
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise CheckpointError(f"{path}: missing. Let transformers save the tokenizer anew, which writes it.")
        return huggingface_file.read_tokenizer_json(path, vocabulary_of(shapes))

    return LlamaSource(str(folder), config, shapes, dtype, read, tokenizer)


def _follows(name: str, tied: bool) -> bool:
    """Return whether a tensor follows from the configuration and the other tensors."""
    return name.endswith("rotary_emb.inv_freq") or (tied and name == "lm_head.weight")


def _files(folder: Path) -> list[Path]:
    """Return the files of the weights, one or several."""
    if (folder / INDEX).is_file():
        names = sorted(set(checked(Index, folder / INDEX, _json(folder / INDEX)).weight_map.values()))
        if strange := [name for name in names if Path(name).name != name or "\0" in name or len(name) > LONGEST_NAME]:
            raise CheckpointError(
                f"{folder / INDEX}: {shown(strange[0])} is in another folder. Use a model that is whole."
            )
        if missing := [name for name in names if not (folder / name).is_file()]:
            raise CheckpointError(f"{folder}: lacks {', '.join(map(shown, missing[:5]))}. Fetch them.")
        return [folder / name for name in names]
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    pickled = next(folder.glob("*.bin"), None)
    why = f"{pickled.name} may run code and is not read" if pickled else f"has no {WEIGHTS}"
    raise CheckpointError(f"{folder}: {why}. Let transformers save the model anew, which writes safetensors.")


def _json(path: Path) -> dict[str, Any]:
    try:
        values = parse_json(path.read_bytes())
    except OSError as error:
        raise CheckpointError(
            f"{path}: cannot be read ({error.strerror}). Name a folder that transformers wrote."
        ) from None
    except ValueError as error:
        raise CheckpointError(f"{path}: no JSON ({error}). Fetch it again.") from None
    if not isinstance(values, dict):
        raise CheckpointError(f"{path}: no configuration. Fetch it again.")
    return values
