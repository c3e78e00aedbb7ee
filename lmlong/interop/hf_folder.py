"""Read folders of transformers: config.json, weights as safetensors, tokenizer.json."""

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
from lmlong.interop.llama import ARCHITECTURE, Architecture, LlamaSource, read_config, vocabulary_of
from lmlong.io.checked import Checked, checked, shown
from lmlong.io.files import parse_json

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
MAX_NAME = 200
"""Characters of a file's name."""
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
            f"{path}: architectures is {shown(kinds)}; only {ARCHITECTURE} is supported. Use another model."
        )
    config = read_config(path, values)
    files = _files(folder)
    opened = ExitStack()
    handles: dict[str, Any] = {}
    for file in files:
        try:
            handle = opened.enter_context(safe_open(file, "pt"))
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file}: damaged or not a safetensors file ({error}). Fetch it again.") from None
        handles |= dict.fromkeys(handle.keys(), handle)
    tied = config.tie_word_embeddings
    slices = {name: handle.get_slice(name) for name, handle in handles.items() if not _is_redundant(name, tied)}
    shapes = {name: tuple(slice.get_shape()) for name, slice in slices.items()}
    dtypes = {slices[name].get_dtype() for name in shapes}
    if unknown := sorted(dtypes - DTYPES.keys()):
        raise CheckpointError(f"{folder}: has weights of type {unknown[0]}; supported are {', '.join(DTYPES)}.")
    dtype = DTYPES[dtypes.pop()] if len(dtypes) == 1 else torch.float32

    def read(name: str) -> Tensor:
        return handles[name].get_tensor(name)

    def tokenizer() -> bytes:
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise CheckpointError(f"{path}: missing. Save the tokenizer again with transformers, which writes it.")
        return huggingface_file.read_tokenizer_json(path, vocabulary_of(shapes))

    return LlamaSource(str(folder), config, shapes, dtype, read, tokenizer)


def _is_redundant(name: str, tied: bool) -> bool:
    """Return whether a tensor is determined by the configuration and the other tensors."""
    return name.endswith("rotary_emb.inv_freq") or (tied and name == "lm_head.weight")


def _files(folder: Path) -> list[Path]:
    """Return the files of the weights, one or several."""
    if (folder / INDEX).is_file():
        names = sorted(set(checked(Index, folder / INDEX, _json(folder / INDEX)).weight_map.values()))
        if outside := [name for name in names if Path(name).name != name or "\0" in name or len(name) > MAX_NAME]:
            raise CheckpointError(
                f"{folder / INDEX}: {shown(outside[0])} is not a file of this folder. Use a complete model."
            )
        if missing := [name for name in names if not (folder / name).is_file()]:
            raise CheckpointError(f"{folder}: {', '.join(map(shown, missing[:5]))} missing. Fetch them.")
        return [folder / name for name in names]
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    pickled = next(folder.glob("*.bin"), None)
    why = f"{pickled.name} may run code and is not read" if pickled else f"has no {WEIGHTS}"
    raise CheckpointError(f"{folder}: {why}. Save the model again with transformers, which writes safetensors.")


def _json(path: Path) -> dict[str, Any]:
    try:
        values = parse_json(path.read_bytes())
    except OSError as error:
        raise CheckpointError(
            f"{path}: cannot be read ({error.strerror}). Name a folder that transformers wrote."
        ) from None
    except ValueError as error:
        raise CheckpointError(f"{path}: not JSON ({error}). Fetch it again.") from None
    if not isinstance(values, dict):
        raise CheckpointError(f"{path}: not a JSON object. Fetch it again.")
    return values
