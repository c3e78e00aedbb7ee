"""The setup of a run from its recipe: tokens, a model, and a number of steps."""

from pathlib import Path
from typing import Literal, NamedTuple

import torch

from lmlong.attention.linear import triton
from lmlong.checkpoint import read
from lmlong.data.data_module import DATA_MODULES, DataModule
from lmlong.data.token_dataset import TokenDataset, prepare
from lmlong.errors import UsageError
from lmlong.model.base import TextModel
from lmlong.model.build import build
from lmlong.model.device import pick_device
from lmlong.model.language_model import LanguageModel
from lmlong.model.memory import check_memory
from lmlong.model.precision import Precision, computes_in_bf16
from lmlong.recipe import Recipe
from lmlong.training.optimizer import count_steps
from lmlong.training.teaching import Teaching, align, check_tokenizer, open_teacher


class Setup(NamedTuple):
    """The setup of a run."""

    recipe: Recipe  # with `auto` resolved for this machine
    tokens: TokenDataset
    model: TextModel
    device: torch.device
    teaching: Teaching | None = None

    @property
    def tokens_per_step(self) -> int:
        return self.recipe.tokens_per_step

    @property
    def steps(self) -> int:
        return count_steps(self.recipe.training, self.tokens_per_step)

    @property
    def data(self) -> DataModule:
        """Return the data module of the recipe."""
        return DATA_MODULES[self.recipe.objective](self.recipe, self.tokens)


def set_up(recipe: Recipe, start: Path | None = None, new_attention: bool = False) -> Setup:
    """Read the text and build the model, with the tokenizer and weights of the checkpoint `start`, if any, else with
    the tokenizer of the teacher, if any.

    With `new_attention` the checkpoint's attention may differ from the recipe's; all else must fit.
    """
    device = pick_device(recipe.device)
    if device.type == "mps" and (recipe.processes > 1 or recipe.training.strategy == "deepspeed"):
        raise UsageError("device: on mps one process trains, without deepspeed. Use devices: 1, or device: cpu.")
    check_kernel(recipe.training.kernel, device)
    training = recipe.training
    optimizer = "muon" if training.optimizer == "auto" else training.optimizer
    training = training.model_copy(update={"precision": resolve(training.precision, device), "optimizer": optimizer})
    recipe = recipe.model_copy(update={"training": training, "device": device.type})
    teaching = open_teacher(recipe.training)
    tokens = prepare(recipe.text, read.read_tokenizer(start) if start else teaching.tokenizer if teaching else None)
    if teaching:
        check_tokenizer(teaching, tokens.tokenizer, recipe.training.teacher)
    check_memory(recipe, tokens.tokenizer.vocabulary, device)

    torch.manual_seed(recipe.seed)
    model = build(recipe, tokens.tokenizer.vocabulary)
    if start:
        read.load_weights(model, start, new_attention)
    if teaching and training.teacher_of == "layers":
        align(model, teaching.teacher.model)
    if isinstance(model, LanguageModel):
        set_kernel(model, training.kernel)
    if training.compile:
        model.compile_blocks()
    return Setup(recipe, tokens, model, device, teaching)


Kernel = Literal["auto", "torch", "triton"]


def check_kernel(kernel: Kernel, device: torch.device) -> None:
    """Refuse a kernel that cannot run on a device."""
    if kernel == "triton" and (why := triton.unavailable_reason(device)):
        raise UsageError(f"training.kernel: triton cannot be used here: {why}. Use torch or auto.")


def set_kernel(model: LanguageModel, kernel: Kernel) -> None:
    """Let the attentions of a model read many tokens by a kernel; `auto` is what they begin with."""
    if kernel != "auto":
        model.use_kernel(kernel)


LIGHTNING = {"32": "32-true", "bf16": "bf16-mixed", "16": "16-mixed"}


def resolve(wanted: Literal["auto", "32", "bf16", "16"], device: torch.device) -> Precision:
    """Return the number format; `auto` is bf16 where the machine computes in it rather than emulating it."""
    if wanted == "16" and device.type == "cpu":
        raise UsageError("training.precision: 16 needs a GPU. Use bf16, 32 or auto.")
    if wanted in ("16", "bf16") and device.type == "mps":
        raise UsageError(f"training.precision: {wanted} is not offered on mps. Use 32 or auto.")
    if wanted != "auto":
        return wanted
    return "bf16" if computes_in_bf16(device) else "32"
