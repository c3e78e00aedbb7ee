"""Build the model of a recipe, by its objective, and estimate its memory before."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from lmlong.attention.base import state_tensors
from lmlong.errors import UsageError
from lmlong.model.base import TextModel, count_in_tables, count_parameters
from lmlong.model.encoder import Encoder
from lmlong.model.language_model import LanguageModel
from lmlong.model.sequence_group import longest_part
from lmlong.recipe import Recipe

LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
"""Files in which Linux reports the memory limit of a container."""


def build(recipe: Recipe, vocabulary: int) -> TextModel:
    """Return a new model for a vocabulary of this size."""
    again = recipe.training.activation_checkpointing is True
    labels = None if recipe.label_names is None else len(recipe.label_names)
    if recipe.is_encoder:
        return Encoder(recipe.model, vocabulary, recipe.text.sequence_length, again, labels)
    return LanguageModel(recipe.model, vocabulary, again, labels)


@contextmanager
def without_memory() -> Iterator[None]:
    """Build models on the meta device: their weights have shapes but no memory."""
    with torch.device("meta"), Undrawn():
        yield


class Undrawn(TorchFunctionMode):
    """A mode that skips weight initialization, for models whose weights are read from a file, and for the meta device,
    where torch would load its compiler for it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__module__", None) == "torch.nn.init":
            return args[0] if args else kwargs["tensor"]
        return func(*args, **(kwargs or {}))


def check_memory(recipe: Recipe, vocabulary: int, device: torch.device) -> None:
    """Raise UsageError if training cannot fit into the memory of a device, even if nothing else uses it."""
    weights, activations = least_bytes(recipe, vocabulary)
    available = total_memory(device)
    if available is None or weights + activations <= available:
        return
    what, key = ("the model", "model.width or model.layers")
    if activations > weights:
        what, key = ("a batch", "training.batch_size or text.sequence_length, or set training.segment")
    raise UsageError(
        f"model: training takes at least {(weights + activations) / 1e9:,.1f} GB, most of it for {what}, and this "
        f"{'GPU' if device.type == 'cuda' else 'machine'} has {available / 1e9:,.1f} GB. Lower {key}."
    )


def least_bytes(recipe: Recipe, vocabulary: int) -> tuple[int, int]:
    """Return lower bounds of the bytes that training takes in a process: for weights, gradients and moments, and for
    states and the inputs of blocks, which are always kept."""
    model, training = recipe.model, recipe.training
    with without_memory():
        built = build(recipe, vocabulary)
        state = sum(tensor.nbytes for tensor in state_tensors(built.init_state(1)))
    shared = recipe.processes if training.strategy == "deepspeed" else 1
    length = recipe.text.sequence_length
    held = min(training.segment or length, longest_part(length, training.sequence_parallel))
    layers = model.layers - len(model.downsampled_layers)
    inputs = training.batch_size * (8 * length + 2 * held * model.width * layers)
    moments = 2 if training.optimizer == "adamw" else 1  # minimum for each weight
    tables = count_in_tables(built)  # without gradients
    weights = 4 * (2 + moments) * (count_parameters(built) - tables) // shared + 4 * tables
    return weights, inputs + training.batch_size * state


def total_memory(device: torch.device) -> int | None:
    """Return the bytes of a device's memory; None if the system does not report it."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    try:
        limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    except (AttributeError, ValueError, OSError):  # Windows
        return None
    for path in map(Path, LIMITS):
        try:
            limits.append(int(path.read_text()))
        except (OSError, ValueError):  # "max" means no limit
            continue
    return min(limits)
