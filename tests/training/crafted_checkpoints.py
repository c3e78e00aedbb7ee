"""Checkpoints that anybody may have made: values changed at random, under a manifest that is right.

A number stands for the same change on every machine. A run resumes from such a checkpoint or refuses it, and so does
what loads its model; nothing ends in another exception.
"""

import io
import json
import math
import shutil
import traceback
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from training.conftest import write_tiny

from lmlong.checkpoint import manifest, read
from lmlong.checkpoint.manifest import RECIPE, TOKENIZER, TRAINING_TENSORS, TRAINING_VALUES, WEIGHTS
from lmlong.errors import LmlongError
from lmlong.inference.loading import load
from lmlong.io.folder_manifest import manifest_text
from lmlong.recipe import file as recipe_file
from lmlong.training.run import train

VALUES = (
    *(None, True, False, -1, 0, 1, 3, 2**31, 2**63 - 1, 2**63, -(2**63), 10**30, 0.5, -1.5, 1e308, math.nan, math.inf),
    *("", "x", [], {}, [0]),
)
TENSORS = (torch.zeros(0), torch.zeros(1), torch.tensor(2**40), torch.ones(3, 3))
DTYPES = (torch.float64, torch.float16, torch.int64, torch.int16, torch.uint8, torch.bool, torch.complex64)
OPTIONS = (
    "training.steps=3",
    "training.carry_state=true",
    "model.attention.kind=[linear,window]",
    "model.attention.window=8",
)


class Place(NamedTuple):
    folder: Path
    run: Path
    recipe: Path


def prepare(folder: Path) -> Place:
    """Train a run of two steps, which carries its states."""
    recipe = write_tiny(folder)
    train(recipe_file.load(recipe, [*OPTIONS, "training.steps=2"]), folder / "run")
    return Place(folder, folder / "run", recipe)


def changed(draw: Random, value: Any) -> Any:
    """Change one of nested plain values."""
    if isinstance(value, dict) and value and draw.random() < 0.95:
        key = draw.choice(sorted(value, key=str))
        if draw.random() < 0.05:
            return {name: each for name, each in value.items() if name != key}
        return {**value, key: changed(draw, value[key])}
    if isinstance(value, list) and value and draw.random() < 0.9:
        at = draw.randrange(len(value))
        return [*value[:at], changed(draw, value[at]), *value[at + 1 :]]
    return draw.choice(VALUES)


def changed_tensor(draw: Random, x: Tensor) -> Tensor:
    match draw.randrange(4):
        case 0 if x.numel():
            x = x.clone()
            edges = (math.nan, math.inf, -1e30, 1e30) if x.is_floating_point() else (-1, 2**31 - 1, -(2**31), 255)
            value = torch.tensor(draw.choice(edges)).to(x.dtype)
            x.view(-1)[draw.randrange(x.numel())] = value
            return x
        case 1:
            return x.to(draw.choice(DTYPES))
        case 2:
            return x.flatten()[:-1].clone()
        case _:
            return x[None].contiguous()


def craft(draw: Random, checkpoint: Path) -> str:
    """Change one file of a checkpoint, and make its manifest anew."""
    name = draw.choice((*("training state",) * 4, WEIGHTS, RECIPE, TOKENIZER, manifest.NAME))
    file, about = checkpoint / name, {"step": 2, "validation": None}
    if name == "training state":
        state = read.read_training(checkpoint)
        tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
        values = {name: value for name, value in state.items() if name not in tensors}
        if draw.random() < 0.5:
            (checkpoint / TRAINING_VALUES).write_text(json.dumps(changed(draw, values)))
        else:
            chosen = draw.choice(sorted(state))  # a value becomes a tensor, or a tensor another one
            tensor = changed_tensor(draw, tensors[chosen]) if chosen in tensors else draw.choice(TENSORS)
            save_file({**tensors, chosen: tensor}, checkpoint / TRAINING_TENSORS)
    elif name == WEIGHTS:
        weights = load_file(file)
        chosen = draw.choice(sorted(weights))
        save_file({**weights, chosen: changed_tensor(draw, weights[chosen])}, file)
    elif name == manifest.NAME:
        about = {key: draw.choice([value, *(x for x in VALUES if x is None or isinstance(x, int | float | str))])
                 for key, value in about.items()}  # fmt: skip
    else:
        data = bytearray(file.read_bytes())
        for at in draw.sample(range(len(data)), min(len(data), draw.choice((1, 3)))):
            data[at] = draw.choice(b"0123456789-.:[]{}~\n \xff")
        file.write_bytes(data)
    (checkpoint / manifest.NAME).write_text(manifest_text(checkpoint, manifest.FORMAT, about))
    return name


def try_checkpoint(number: int, place: Place) -> tuple[str, list[str]]:
    """Load and resume from the checkpoint of a number; return what came of it and what is wrong."""
    draw, run, new = Random(number), place.folder / "crafted", place.folder / "new"
    for folder in (run, new):
        shutil.rmtree(folder, ignore_errors=True)
    checkpoint = read.find(shutil.copytree(place.run, run, symlinks=True))
    name, ends, complaints = craft(draw, checkpoint), [], []
    for use in (
        lambda: load(checkpoint, "cpu"),
        lambda: train(recipe_file.load(place.recipe, [*OPTIONS]), new, resume=str(checkpoint)),
    ):
        try:
            with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
                use()
            ends.append("used")
        except LmlongError:
            ends.append("refused")
        except Exception:
            complaints.append(f"{name}: {traceback.format_exc()}")
            ends.append("crashed")
    return " and ".join(ends), complaints
