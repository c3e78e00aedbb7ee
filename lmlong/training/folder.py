"""The folder of a run: whether it may be used, where to go on from, and what is written down about the run."""

import json
import platform
import shutil
import sys
import time
from importlib.metadata import version
from pathlib import Path

import torch

from lmlong.checkpoint import write
from lmlong.errors import UsageError
from lmlong.model.language_model import parameters
from lmlong.recipe import file as recipe_file
from lmlong.training.setup import Setup

PACKAGES = ("lmlong", "torch", "lightning", "sentencepiece", "safetensors", "numpy")


def check_free(folder: Path) -> None:
    """Refuse a folder that holds a run already."""
    if folder.exists() and any(folder.iterdir()):
        remedy = "Go on with it by --resume auto, replace it by --overwrite, or choose --out."
        raise UsageError(f"{folder}: exists. {remedy}")


def open_folder(folder: Path, setup: Setup, keep: bool) -> None:
    """Write down what the run is made of, into a new folder unless what is there is to be kept."""
    if not keep:
        shutil.rmtree(folder, ignore_errors=True)
    (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
    write.clean(folder / "checkpoints")
    (folder / "recipe.yaml").write_text(recipe_file.dump(setup.recipe), encoding="utf-8")
    setup.tokens.tokenizer.save(folder / "tokenizer.model")
    environment = {
        "command": sys.argv,
        "begun": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "python": platform.python_version(),
        "packages": {name: version(name) for name in PACKAGES},
        "machine": platform.platform(),
        "device": torch.cuda.get_device_name() if setup.device.type == "cuda" else platform.processor(),
        "threads": torch.get_num_threads(),
        "parameters": parameters(setup.model),
        "text": setup.tokens.info,
    }
    (folder / "environment.json").write_text(json.dumps(environment, indent=2) + "\n", encoding="utf-8")
