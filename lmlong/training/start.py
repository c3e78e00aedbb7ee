"""The start of a run: its folder is written when everything has been set up, so that a start that fails leaves nothing
behind and replaces nothing."""

import json
import platform
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer

from lmlong import __version__
from lmlong.attention.plugins import LOADED
from lmlong.checkpoint.manifest import RECIPE, TOKENIZER
from lmlong.data.text_info import text_notes
from lmlong.io.files import atomic_write
from lmlong.model.base import count_parameters, describe_parameters
from lmlong.recipe.find import ENVIRONMENT
from lmlong.recipe.training import format_name
from lmlong.training.callbacks import TrainingCallback
from lmlong.training.distributed import is_main_process
from lmlong.training.loggers import make_loggers
from lmlong.training.module import TrainingModule
from lmlong.training.optimizer import ENDLESS
from lmlong.training.progress import Intervals
from lmlong.training.resume import make_newest
from lmlong.training.run_folder import clear

PACKAGES = ("torch", "lightning", "sentencepiece", "safetensors", "numpy")


class Start(Callback):
    """Writes the run folder before the first step, with a resumed run's history up to `checkpoint`. With `overwrite`,
    the run that was there is removed first."""

    def __init__(self, callback: TrainingCallback, checkpoint: Path | None, overwrite: bool):
        self.callback, self.checkpoint, self.overwrite = callback, checkpoint, overwrite

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        if is_main_process():
            self.write_folder()
        trainer.loggers = make_loggers(self.callback)

    def write_folder(self) -> None:
        folder = self.callback.folder
        if self.overwrite:
            clear(folder)
        if self.checkpoint:
            make_newest(folder, self.checkpoint, self.callback.checkpoints)
        _record(self.callback)


def _record(callback: TrainingCallback) -> None:
    """Write the recipe, the tokenizer and the environment of a run into its folder."""
    folder, prepared = callback.folder, callback.prepared
    environment = {
        "command": sys.argv,
        "begun": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "python": platform.python_version(),
        "packages": {"lmlong": __version__, **{name: version(name) for name in PACKAGES}},
        "plugins": {name: LOADED[name].sha256 for name in prepared.recipe.plugins},
        "machine": platform.platform(),
        "device": torch.cuda.get_device_name() if prepared.device.type == "cuda" else platform.processor(),
        "threads": torch.get_num_threads(),
        "parameters": count_parameters(prepared.model),
        "text": prepared.tokens.info,
    }
    atomic_write(folder / ENVIRONMENT, json.dumps(environment, indent=2) + "\n")
    atomic_write(folder / RECIPE, callback.recipe_text)
    prepared.tokens.tokenizer.save(folder / TOKENIZER)


def print_start(module: TrainingModule) -> None:
    """Print the size, length and device of the run, and when it is validated and saved, to stderr."""
    prepared, training = module.prepared, module.recipe.training
    length = f"{prepared.steps:,} steps"
    if training.epochs:
        length += f" (at most {training.epochs:g} epochs of {prepared.tokens.train_tokens:,} tokens)"
    if training.minutes is not None:
        limit = ", steps" if prepared.steps == ENDLESS else f" or {length}"
        length = f"{training.time_limit}{limit}"
    for line in text_notes(prepared.tokens.info):
        print(line, file=sys.stderr)
    print(
        f"{describe_parameters(prepared.model)}, {length} of {prepared.recipe.tokens_per_step:,} tokens, "
        f"{format_name(training.precision)} on {prepared.device.type}"
        + (f", from {prepared.start}" if prepared.start else ""),
        Intervals(training, module.clock),
        sep="\n",
        file=sys.stderr,
    )
