"""Folders as transformers writes them: config.json, weights as safetensors, tokenizer.json."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lmlong.checkpoint.write import NAMES
from lmlong.data import huggingface_tokenizer
from lmlong.errors import UsageError
from lmlong.interop.llama import ARCHITECTURE, Source
from lmlong.io.files import parse_json

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = {name: dtype for dtype, name in NAMES.items()}


def open_folder(folder: Path) -> Source:
    """Return the model of a folder."""
    config = _json(folder / "config.json")
    kinds = config.get("architectures") or [config.get("model_type")]
    if kinds != [ARCHITECTURE]:
        raise UsageError(f"{folder}: a model of the kind {', '.join(map(str, kinds))}; {ARCHITECTURE} alone is known.")
    files = _files(folder)
    opened = ExitStack()
    where: dict[str, Any] = {}
    for file in files:
        try:
            handle = opened.enter_context(safe_open(file, "pt"))
        except (SafetensorError, OSError) as error:
            raise UsageError(f"{file}: no safetensors file, or damaged ({error}). Fetch it again.") from None
        where |= dict.fromkeys(handle.keys(), handle)
    tied = bool(config.get("tie_word_embeddings", False))
    slices = {name: handle.get_slice(name) for name, handle in where.items() if not _follows(name, tied)}
    shapes = {name: tuple(slice.get_shape()) for name, slice in slices.items()}
    kinds = {slices[name].get_dtype() for name in shapes}
    if strange := sorted(kinds - DTYPES.keys()):
        raise UsageError(f"{folder}: has weights of type {strange[0]}; those of {', '.join(DTYPES)} are read.")
    dtype = DTYPES[kinds.pop()] if len(kinds) == 1 else torch.float32

    def read(name: str) -> Tensor:
        return where[name].get_tensor(name)

    def tokenizer() -> bytes:
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise UsageError(f"{path}: missing. Let transformers save the tokenizer anew, which writes it.")
        return huggingface_tokenizer.read(path, shapes.get("model.embed_tokens.weight", (None,))[0])

    return Source(str(folder), config, shapes, dtype, read, tokenizer)


def _follows(name: str, tied: bool) -> bool:
    """Return whether a tensor says nothing that the configuration and the others do not."""
    return name.endswith("rotary_emb.inv_freq") or (tied and name == "lm_head.weight")


def _files(folder: Path) -> list[Path]:
    """Return the files of the weights, one or several."""
    if (folder / INDEX).is_file():
        try:
            names = sorted(set(_json(folder / INDEX)["weight_map"].values()))
        except (KeyError, AttributeError, TypeError):
            raise UsageError(f"{folder / INDEX}: lists no files. Fetch it again.") from None
        if strange := [name for name in names if Path(name).name != name]:
            raise UsageError(f"{folder / INDEX}: {strange[0]} lies in another folder. Use a model that is whole.")
        if missing := [name for name in names if not (folder / name).is_file()]:
            raise UsageError(f"{folder}: lacks {', '.join(missing)}. Fetch them.")
        return [folder / name for name in names]
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    pickled = next(folder.glob("*.bin"), None)
    why = f"{pickled.name} may run code and is not read" if pickled else f"has no {WEIGHTS}"
    raise UsageError(f"{folder}: {why}. Let transformers save the model anew, which writes safetensors.")


def _json(path: Path) -> dict[str, Any]:
    try:
        found = parse_json(path.read_bytes())
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror}). Name a folder that transformers wrote.") from None
    except ValueError as error:
        raise UsageError(f"{path}: no JSON ({error}). Fetch it again.") from None
    if not isinstance(found, dict):
        raise UsageError(f"{path}: no configuration. Fetch it again.")
    return found
