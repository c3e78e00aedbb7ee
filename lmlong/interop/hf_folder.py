"""Read folders of transformers: config.json, weights as safetensors, tokenizer.json."""

import re
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lmlong.checkpoint.write import NAMES
from lmlong.data.tokenizers import huggingface_file
from lmlong.errors import CheckpointError
from lmlong.interop.architecture import Architecture, Source
from lmlong.interop.delta_hybrids import Olmo, Qwen
from lmlong.interop.lfm2 import Lfm
from lmlong.interop.llama import Llama
from lmlong.io.checked import Checked, checked, shown
from lmlong.io.files import parse_json

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
MAX_NAME = 200
"""Characters of a file's name."""
DTYPES = {name: dtype for dtype, name in NAMES.items()}
ARCHITECTURES: tuple[Architecture[Any], ...] = (Llama(), Qwen(), Olmo(), Lfm())


class Kind(Checked):
    """The kind of a model in its config.json."""

    architectures: list[str] = Field(default_factory=list)
    model_type: str = ""
    text_config: dict[str, Any] | None = None
    """The values of the text part of a model that also reads pictures."""


class Index(Checked):
    """The file in which each weight is stored."""

    weight_map: Annotated[dict[str, str], Field(min_length=1)]


def architecture_of(path: Path, kinds: list[str]) -> Architecture[Any]:
    """Return the architecture that a config.json names."""
    for architecture in ARCHITECTURES:
        if len(kinds) == 1 and kinds[0] in (architecture.name, *architecture.loads):
            return architecture
    supported = ", ".join(architecture.name for architecture in ARCHITECTURES)
    why = f"supported are {supported}"
    if any("moe" in kind.lower() for kind in kinds):
        why = f"mixtures of experts are not supported, only dense models ({supported})"
    raise CheckpointError(f"{path}: architectures is {shown(kinds)}; {why}. Use another model.")


def without_null(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values without nulls and empty rope parameters, which count as missing."""
    set_values = {}
    for key, value in values.items():
        if key in ("rope_parameters", "rope_scaling") and isinstance(value, dict):
            value = without_null(value) or None
        if value is not None:
            set_values[key] = value
    return set_values


def open_folder(folder: Path) -> Source:
    """Return the model of a folder."""
    path = folder / "config.json"
    values = _json(path)
    about = checked(Kind, path, values)
    architecture = architecture_of(path, about.architectures or [about.model_type])
    tied = {key: value for key, value in values.items() if key == "tie_word_embeddings"}
    text = values if about.text_config is None else {**tied, **about.text_config}
    config = checked(architecture.config, path, without_null(text))
    files = _files(folder)
    opened = ExitStack()
    handles: dict[str, Any] = {}
    for file in files:
        try:
            handle = opened.enter_context(safe_open(file, "pt"))
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file}: damaged or not a safetensors file ({error}). Fetch it again.") from None
        handles |= dict.fromkeys(handle.keys(), handle)
    left_out = {
        name: what for name in handles for begin, what in architecture.left_out.items() if re.match(begin, name)
    }
    names = {_renamed(name, architecture): name for name in handles if name not in left_out}
    is_tied = architecture.tied(config)
    slices = {name: handles[own].get_slice(own) for name, own in names.items() if not _is_redundant(name, is_tied)}
    shapes = {name: tuple(slice.get_shape()) for name, slice in slices.items()}
    stored = {name: slice.get_dtype() for name, slice in slices.items()}
    if unknown := sorted(set(stored.values()) - DTYPES.keys()):
        raise CheckpointError(f"{folder}: has weights of type {unknown[0]}; supported are {', '.join(DTYPES)}.")

    def read(name: str) -> Tensor:
        return handles[names[name]].get_tensor(names[name])

    def tokenizer() -> bytes:
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise CheckpointError(f"{path}: missing. Save the tokenizer again with transformers, which writes it.")
        return huggingface_file.read_tokenizer_json(path, source.vocabulary())

    dtypes = {name: DTYPES[kind] for name, kind in stored.items()}
    words = [f"{count:,} weights {what}" for what, count in Counter(left_out.values()).items()]
    source = Source(str(folder), architecture, config, shapes, dtypes, read, tokenizer, words)
    return source


def _renamed(name: str, architecture: Architecture[Any]) -> str:
    before, after = architecture.renamed
    return after + name.removeprefix(before) if before and name.startswith(before) else name


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
