"""Preparation of a run from its recipe: tokens, model and teacher."""

from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from lmlong.attention.plugins import in_words
from lmlong.checkpoint import manifest, read
from lmlong.data.data_module import DATA_MODULES, DataModule
from lmlong.data.hub import with_commits
from lmlong.data.labels import with_label_names
from lmlong.data.token_dataset import TokenDataset, prepare
from lmlong.decode import native as decode
from lmlong.errors import LmlongError, UsageError
from lmlong.model.allocations import bytes_of_step
from lmlong.model.base import EMBEDDING_STD, TextModel
from lmlong.model.build import build, check_memory, least_bytes, total_memory, without_memory
from lmlong.model.device import Precision, is_faster_in_bf16, pick_device
from lmlong.model.language_model import LanguageModel
from lmlong.model.layers import Linear
from lmlong.model.sinks import make_sinks
from lmlong.native.rows import kernel as rows
from lmlong.recipe import Recipe
from lmlong.training.distillation import Teacher, load_teacher, train_mixers_alone, train_ngram_alone
from lmlong.training.optimizer import count_steps

MEMORY_SHARE = 0.85
"""Share of a device's memory that a step may take, by an estimate, without activation checkpointing."""


class PreparedRun(NamedTuple):
    """A run before its first step."""

    recipe: Recipe  # with `auto` resolved for this machine
    tokens: TokenDataset
    model: TextModel  # on the meta device if `divides_weights`
    device: torch.device
    build: Callable[[], TextModel]  # the model again, with memory
    teacher: Teacher | None = None
    start: Path | str | None = None  # the checkpoint or run that its weights come from
    state: dict[str, Any] | None = None  # the training state to resume from
    weights_hash: str = ""  # of the weights to resume from
    tokens_before: int = 0  # trained on before, by the run that this one began from

    @property
    def steps(self) -> int:
        return count_steps(self.recipe.training, self.recipe.tokens_per_step, self.data.epoch_tokens)

    @property
    def first_step(self) -> int:
        """The optimizer steps taken before this process began."""
        return self.state["step"] if self.state else 0

    @property
    def data(self) -> DataModule:
        """Return the data module of the recipe."""
        return DATA_MODULES[self.recipe.objective](self.recipe, self.tokens)

    @property
    def source_hashes(self) -> dict[str, str]:
        """The hashes of the text and the teacher, which may not change when a run resumes."""
        return {"text": self.tokens.identity, "teacher": self.teacher.weights_hash if self.teacher else ""}


def prepare_new_run(recipe: Recipe) -> PreparedRun:
    """Return a run that begins with the weights of `training.init_from`, if any; its attention may differ."""
    source = recipe.training.init_from
    if source is None:
        return prepare_run(recipe)
    if recipe.objective != "label" and read.reading(source, read.read_recipe).objective == "label":
        remedy = "Set objective: label, or name the run that it began from."
        raise UsageError(f"training.init_from: {source} predicts labels, so it has no output layer of tokens. {remedy}")
    prepared, tokens_before = read.reading(
        source, lambda start: (prepare_run(recipe, start, new_attention=True), read.trained_tokens(start))
    )
    return prepared._replace(start=source, tokens_before=tokens_before)


def prepare_run(
    recipe: Recipe, start: Path | None = None, new_attention: bool = False, verify: bool = True
) -> PreparedRun:
    """Tokenize the text and build the model.

    The checkpoint `start`, if any, provides the tokenizer, weights and buffers; otherwise a teacher, if any, provides
    the tokenizer. With `new_attention` the checkpoint's attention may differ from the recipe's; everything else must
    fit.
    """
    recipe, device = _resolve(recipe)
    training = recipe.training
    teacher = load_teacher(training)
    tokenizer = read.read_tokenizer(start, verify) if start else teacher.tokenizer if teacher else None
    begin_native(recipe)
    tokens = prepare(recipe.text, tokenizer)
    if recipe.text.labels:
        text = with_label_names(recipe.text, [*tokens.train, tokens.validation])
        recipe = recipe.model_copy(update={"text": text})
    if teacher and teacher.tokenizer.hash != tokens.tokenizer.hash:
        raise UsageError(
            f"training.teacher: {training.teacher} has another tokenizer than training.init_from. Choose two runs with "
            "the same tokenizer, or leave one out."
        )
    check_memory(recipe, tokens.tokenizer.vocabulary, device)
    recipe = _with_checkpointing(recipe, tokens.tokenizer.vocabulary, device)
    if start and verify:
        manifest.verify(start, [manifest.WEIGHTS])
    build_again = partial(_build, recipe, tokens.tokenizer.vocabulary, start, new_attention, teacher)
    with without_memory() if divides_weights(recipe) else nullcontext():
        model = build_again()
    return PreparedRun(recipe, tokens, model, device, build_again, teacher)


def begin_native(recipe: Recipe) -> None:
    """Begin to load the native code that a model is trained with, and then that which it writes with. It is compiled at
    its first use, while another processor imports Lightning and reads the text. Errors are reported when it is used."""

    def load(outline: LanguageModel) -> None:
        with suppress(LmlongError):
            rows.library()
            for attention in outline.attention_parts:
                attention.kernel_reasons(torch.device("cpu"))
            decode.library()

    if recipe.objective == "causal" and pick_device(recipe.device).type == "cpu":
        Thread(target=load, args=[_outline(recipe)], daemon=True).start()


def _build(
    recipe: Recipe, vocabulary: int, start: Path | None, new_attention: bool, teacher: Teacher | None
) -> TextModel:
    """Return the model of a run before its first step, with the weights of a verified checkpoint, if any."""
    training = recipe.training
    torch.manual_seed(recipe.seed)
    model = build(recipe, vocabulary)
    if start:
        load_start(model, start, new_attention, verify=False)
    if teacher and training.teacher_of == "layers":
        train_mixers_alone(model, teacher.model)
    if training.only_ngram:
        assert isinstance(model, LanguageModel)
        train_ngram_alone(model)
    if isinstance(model, LanguageModel):
        model.use_kernel(training.kernel)
    if training.compile:
        model.compile_blocks()
    return model


def load_start(model: TextModel, checkpoint: Path, new_attention: bool, verify: bool = True) -> None:
    """Load the weights of a checkpoint into a model, whose attention may be another. Sinks that it does not have are
    made of its first token."""
    new = read.load_weights(model, checkpoint, new_attention, verify)
    if "embedding_growth" in new and model.embedding_growth is not None:
        size = model.embedding.weight.detach().square().mean().sqrt()
        model.embedding_growth.fill_(size / EMBEDDING_STD).clamp_(min=1)
    if isinstance(model, LanguageModel):
        make_sinks(model, new)


def model_to_check(prepared: PreparedRun) -> LanguageModel:
    """Return the model to check kernels on: one with a layer of each kind if the model of the run has no memory yet."""
    recipe, model = prepared.recipe, prepared.model
    assert isinstance(model, LanguageModel)
    if not divides_weights(recipe):
        return model
    layers = min(recipe.model.layers, len(recipe.model.attention.kind_names))
    added = [1] if recipe.model.add_ngram else []
    one_of_each = recipe.model.model_copy(update={"layers": layers, "downsample": None, "add_ngram": added})
    with torch.random.fork_rng(devices=[]):
        small = build(recipe.model_copy(update={"model": one_of_each}), vocabulary=1)
    assert isinstance(small, LanguageModel)
    small.use_kernel(recipe.training.kernel)
    return small


def divides_weights(recipe: Recipe) -> bool:
    """Return whether the ranks divide the weights of the model, so that none of them may build all of it."""
    return recipe.training.strategy == "deepspeed" and recipe.training.deepspeed.stage == 3


def _resolve(recipe: Recipe) -> tuple[Recipe, torch.device]:
    """Return the recipe with `auto` resolved for this machine, and revisions on the hub to commits; and its device.
    Refuse what the device cannot do."""
    device = pick_device(recipe.device)
    if device.type == "mps" and (recipe.processes > 1 or recipe.training.strategy == "deepspeed"):
        raise UsageError("device: mps supports only one process, without deepspeed. Use devices: 1, or device: cpu.")
    _check_kernel_of(recipe, device)
    if recipe.training.quantize:
        _check_roundable(_outline(recipe))
    if recipe.training.sequence_parallel > 1:
        _check_divides(_outline(recipe))
    optimizer = "muon" if recipe.training.optimizer == "auto" else recipe.training.optimizer
    resolved = {"precision": resolve(recipe.training.precision, device), "optimizer": optimizer}
    training = recipe.training.model_copy(update=resolved)
    changed = {"training": training, "device": device.type, "text": with_commits(recipe.text)}
    return recipe.model_copy(update=changed), device


def _with_checkpointing(recipe: Recipe, vocabulary: int, device: torch.device) -> Recipe:
    """Return the recipe with `activation_checkpointing: auto` resolved."""
    if recipe.training.activation_checkpointing != "auto":
        return recipe

    def resolved(checkpointing: bool) -> Recipe:
        training = recipe.training.model_copy(update={"activation_checkpointing": checkpointing})
        return recipe.model_copy(update={"training": training})

    memory = total_memory(device)
    if divides_weights(recipe) or memory is None:
        return resolved(True)
    kept = resolved(False)
    needed = least_bytes(kept, vocabulary)[0] + bytes_of_step(kept, vocabulary)
    return resolved(needed > MEMORY_SHARE * memory)


KernelName = Literal["auto", "torch", "triton", "fla"]


def check_kernel(kernel: KernelName, model: LanguageModel, device: torch.device) -> None:
    """Refuse a kernel that cannot compute an attention of a model on a device. Torch computes attentions that have no
    kernel of that name."""
    for attentions in model.with_kernels.values():
        if why := attentions[0].kernel_reasons(device).get(kernel):
            raise UsageError(f"training.kernel: {kernel} cannot be used here: {why}. Use torch or auto.")


def _check_kernel_of(recipe: Recipe, device: torch.device) -> None:
    """Refuse the kernel of a recipe before any work if it cannot be used, or if no attention of the model has it."""
    kernel = recipe.training.kernel
    if kernel in ("auto", "torch") or recipe.is_encoder:
        return
    model = _outline(recipe)
    check_kernel(kernel, model, device)
    have = {kind: attentions[0].kernels for kind, attentions in model.with_kernels.items()}
    if not any(kernel in kernels for kernels in have.values()):
        kinds = ", ".join(dict.fromkeys(model.kinds))
        raise UsageError(f"training.kernel: no attention of the model ({kinds}) has a kernel {kernel}. Use auto.")


def _check_roundable(model: LanguageModel) -> None:
    """Refuse a model with linear layers that `round_weights` does not reach."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and not isinstance(module, Linear):
            raise UsageError(
                f"training.quantize: {name} is a linear layer of a plug-in, whose weight cannot be rounded. "
                "Let the plug-in use lmlong.model.layers.Linear, or leave out quantize."
            )


def _check_divides(model: LanguageModel) -> None:
    """Refuse a model with an attention that cannot read a part of a row."""
    for part in model.attention_parts:
        if not part.divides:
            raise UsageError(
                f"training.sequence_parallel: {in_words(part)} has no `effect`, by which the parts of a row would be "
                "put together. Define effect and after_effect, or leave sequence_parallel out."
            )


def _outline(recipe: Recipe) -> LanguageModel:
    """Return the language model of a recipe without its weights, which shows what it can do before any work."""
    with without_memory():
        model = build(recipe, vocabulary=1)
    assert isinstance(model, LanguageModel)
    return model


def resolve(precision: Literal["auto", "32", "bf16", "16"], device: torch.device) -> Precision:
    """Return the number format; `auto` is bf16 where it is faster, else 32."""
    if precision == "16" and device.type == "cpu":
        raise UsageError("training.precision: 16 needs a GPU. Use bf16, 32 or auto.")
    if precision in ("16", "bf16") and device.type == "mps":
        raise UsageError(f"training.precision: {precision} is not offered on mps. Use 32 or auto.")
    if precision != "auto":
        return precision
    return "bf16" if is_faster_in_bf16(device) else "32"
