"""A run as a folder that transformers loads where lmlong is not installed."""

import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

from safetensors.torch import save_file
from torch import Tensor

from lmlong.checkpoint import manifest, read
from lmlong.checkpoint.write import NAMES
from lmlong.errors import UsageError
from lmlong.interop.hf import config as configs
from lmlong.interop.hf.card import model_card
from lmlong.interop.hf.tokenizer import tokenizer_files
from lmlong.io.system_errors import named
from lmlong.model.build import build
from lmlong.model.language_model import LanguageModel
from lmlong.model.state_size import state_size

MODULE = Path(__file__).with_name(f"{configs.MODULE}.py")
DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
UNBOUNDED = 10**30
"""How many tokens transformers takes a text to have at most, where there is no limit."""


class Exported(NamedTuple):
    """What was written."""

    folder: Path
    parameters: int
    architecture: str


def export_hf(run: str, folder: Path, evaluation: dict[str, Any] | None = None) -> Exported:
    """Write a run as a folder for transformers, whole or not at all; `evaluation` is what `lmlong eval` told of it."""
    checkpoint = read.find(run)
    recipe = read.read_recipe(checkpoint)
    configs.check(recipe)
    check_free(folder)
    tokenizer, weights, state = read.read_tokenizer(checkpoint), read.read_weights(checkpoint), None
    read.check_size(checkpoint, recipe, lambda recipe: build(recipe, tokenizer.vocabulary))
    if configs.is_llama(recipe.model):
        config, longest = configs.llama_config(recipe, tokenizer.vocabulary), recipe.text.sequence_length
        theirs, module = configs.llama_weights(weights, recipe.model), {}
    else:
        model = build(recipe, tokenizer.vocabulary)
        assert isinstance(model, LanguageModel)
        config, longest = configs.lmlong_config(recipe.model, model, tokenizer.vocabulary), UNBOUNDED
        theirs, module = configs.lmlong_weights(weights), {MODULE.name: MODULE.read_text(encoding="utf-8")}
        state = state_size(model)
    ends, dtype = configs.ends(tokenizer), DTYPES[NAMES[next(iter(weights.values())).dtype]]
    files = {
        "config.json": _json({**config, **ends, "dtype": dtype}),
        "generation_config.json": _json(ends),
        **tokenizer_files(tokenizer, longest),
        **module,
        "README.md": model_card(folder.name, recipe, checkpoint, weights, state, evaluation),
    }
    _write(folder, files, theirs)
    return Exported(folder, sum(weight.numel() for weight in weights.values()), config["architectures"][0])


def check_free(folder: Path) -> None:
    """Refuse a folder that holds anything."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder}: exists, and is not empty. Choose another --out.")


def _write(folder: Path, files: dict[str, str], weights: dict[str, Tensor]) -> None:
    staged = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(staged, ignore_errors=True)
    try:
        with named(folder, "Nothing was exported."):
            staged.mkdir(parents=True)
            for name, text in files.items():
                (staged / name).write_text(text, encoding="utf-8")
            save_file(weights, staged / manifest.WEIGHTS, metadata={"format": "pt"})
            if folder.exists():
                folder.rmdir()
            staged.rename(folder)
    finally:
        shutil.rmtree(staged, ignore_errors=True)


def _json(values: dict[str, Any]) -> str:
    return json.dumps(values, indent=2) + "\n"
