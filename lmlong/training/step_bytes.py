"""The tensors that a process holds at the peak of a training step, by calculation in the form for a GPU.

A forward and backward pass runs on tensors that have shapes and no values. The other processes of its group do not
exist: it receives copies of what it sends.

Left out is what else takes memory: Python, libraries, fragments between tensors, and the temporary tensors of the
update, when no activations are held.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lmlong.attention.device_policy import GPU_POLICY, use_policy
from lmlong.model.allocations import Allocations
from lmlong.model.build import build, without_memory
from lmlong.model.language_model import LanguageModel
from lmlong.model.sequence_group import SequenceGroup, longest_part
from lmlong.recipe import Recipe
from lmlong.training.deepspeed_config import LARGEST_BUCKET, set_sizes
from lmlong.training.optimizer import moments_of, parameter_groups

FLOAT32 = 4
"""Bytes of a weight, a gradient and a moment."""

ROW_BYTES = 17
"""Bytes of a token of a batch: the token, its target, and whether a document starts there."""

MOST_TOKENS, MOST_LAYERS = 2**17, 3
"""The largest pass that is computed. Beyond it, bytes grow in proportion to the tokens and layers."""

ENOUGH_TOKENS = 4096
"""Tokens of a part from which on an effect of constant size has that size."""


class StepBytes(NamedTuple):
    """The bytes of tensors in a process, by what they are for."""

    weights: int  # with those that the optimizer updates, if these are others
    gradients: int  # with the buffers in which they are summed over the processes
    moments: int
    activations: int = 0  # with all other tensors of a forward and backward pass
    effects: int = 0  # what the parts of rows do to states, gathered from all processes of a group

    @property
    def total(self) -> int:
        return sum(self)

    def text(self) -> str:
        """Return the gigabytes by name."""
        names = dict.fromkeys(self._fields) | {"effects": "gathered effects"}
        return ", ".join(f"{size / 1e9:.3g} GB {names[name] or name}" for name, size in self._asdict().items())


class LastProcess(SequenceGroup):
    """The last process of a group without the others. It receives copies of its own tensors."""

    sent_forward = 0
    """Bytes sent before the backward pass."""

    def __init__(self, size: int):
        self.rank, self.size = size - 1, size

    def gather(self, x: Tensor) -> Tensor:
        self.bytes_sent += x.nbytes * (self.size - 1)
        return torch.stack([x] * self.size)

    def sum_of_own(self, x: Tensor) -> Tensor:
        self.bytes_sent += x.nbytes // self.size * (self.size - 1)
        return x[self.rank].clone()

    def from_last(self, x: Tensor) -> Tensor:
        self.bytes_sent += x.nbytes * (self.size - 1)
        return x


def step_bytes(recipe: Recipe, vocabulary: int, length: int, on_gpu: bool = True) -> StepBytes:
    """Return the bytes of tensors in a process at the peak of a step of a causal model, on rows of some length."""
    rows, parts = recipe.training.batch_size, recipe.training.sequence_parallel
    own = longest_part(length, parts)
    activations = activation_bytes(recipe, vocabulary, own) + ROW_BYTES * rows * (length - own)
    effects = rows * gathered_bytes(recipe, length, parts)
    return count_state(recipe, vocabulary, on_gpu)._replace(activations=activations, effects=effects)


def count_state(recipe: Recipe, vocabulary: int, on_gpu: bool = True) -> StepBytes:
    """Return the bytes of the training state of a causal model in a process."""
    with without_memory():
        groups = parameter_groups(LanguageModel(recipe.model, vocabulary), recipe.training)
    sizes = [(sum(weight.numel() for weight in group["params"]), moments_of(group)) for group in groups]
    moments = sum(size * sum(name != "step" for name in names) for size, names in sizes)
    return state_bytes(recipe, sum(size for size, _ in sizes), moments, on_gpu)


def state_bytes(recipe: Recipe, parameters: int, moments: int, on_gpu: bool) -> StepBytes:
    """Return the bytes of the training state, for numbers of weights, without tables, and of the optimizer's
    moments."""
    ranks, training = recipe.processes, recipe.training
    tables = FLOAT32 * recipe.model.table_numbers  # all of them in each process
    if training.strategy != "deepspeed":
        copies = 1 if ranks == 1 else 2  # with the buckets of ddp
        return StepBytes(FLOAT32 * parameters + tables, FLOAT32 * copies * parameters, FLOAT32 * moments)
    part, stage = -(-parameters // ranks), training.deepspeed.stage
    whole, buckets = parameters, min(parameters, LARGEST_BUCKET) * (2 if on_gpu else 1)  # one is sent, the other filled
    if stage == 3:
        zero: dict[str, Any] = {"stage": stage}
        with without_memory():
            set_sizes(zero, build(recipe, 1))
        whole, buckets = zero["stage3_max_live_parameters"], zero["reduce_bucket_size"]
    return StepBytes(FLOAT32 * (whole + part) + tables, FLOAT32 * (buckets + part), FLOAT32 * -(-moments // ranks))


def activation_bytes(recipe: Recipe, vocabulary: int, tokens: int) -> int:
    """Return the bytes at the peak of a forward and backward pass over some tokens of each row."""
    if tokens <= MOST_TOKENS:
        return _of_layers(recipe, partial(pass_through, vocabulary=vocabulary, tokens=tokens))
    half, most = (activation_bytes(recipe, vocabulary, count) for count in (MOST_TOKENS // 2, MOST_TOKENS))
    return most + (most - half) * (tokens - MOST_TOKENS) // (MOST_TOKENS // 2)


def gathered_bytes(recipe: Recipe, length: int, parts: int) -> int:
    """Return the bytes of the effects that a process gathers for a row of some length that `parts` processes read."""
    if parts == 1:
        return 0
    tokens = longest_part(length, parts)
    if recipe.model.state_growth == "constant":  # then they do not depend on the length
        tokens = min(tokens, ENOUGH_TOKENS)
    recipe = recipe.model_copy(update={"training": recipe.training.model_copy(update={"batch_size": 1})})

    def added(recipe: Recipe) -> int:
        alone = pass_through(recipe, 1, tokens)
        together = pass_through(recipe, 1, parts * tokens, LastProcess(parts))
        return together - alone - ROW_BYTES * (parts - 1) * tokens

    return max(_of_layers(recipe, added), 0)


def _of_layers(recipe: Recipe, of: Callable[[Recipe], int]) -> int:
    """Return the bytes of all layers of a recipe, by those of fewer layers if all are alike."""
    model = recipe.model
    if model.layers <= MOST_LAYERS or len(set(model.mixer_kinds)) > 1 or model.downsampled_layers:
        return of(recipe)
    counts = MOST_LAYERS - 1, MOST_LAYERS
    fewer, more = (of(recipe.model_copy(update={"model": model.model_copy(update={"layers": n})})) for n in counts)
    return more + (more - fewer) * (model.layers - MOST_LAYERS)


def pass_through(recipe: Recipe, vocabulary: int, tokens: int, group: LastProcess | None = None) -> int:
    """Return the bytes at the peak of a forward and backward pass over rows of some tokens, or over the last part of
    them."""
    training, dtype = recipe.training, {"bf16": torch.bfloat16, "16": torch.float16}.get(recipe.training.precision)
    with without_memory():
        model = LanguageModel(recipe.model, vocabulary, training.activation_checkpointing)
    with FakeTensorMode():
        _move_to_cpu(model)
        use_policy(model, GPU_POLICY)
        model.use_kernel("torch")
        model.round_weights(training.quantize)
        with Allocations() as allocations:
            rows = torch.zeros(training.batch_size, tokens, dtype=torch.long)
            targets, starts = rows.clone(), torch.zeros_like(rows, dtype=torch.bool)
            with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
                if group is None:
                    loss, _ = model.loss(rows, targets, starts)
                else:
                    loss, _ = model.loss_of_part(rows, targets, starts, None, group)
                    group.sent_forward = group.bytes_sent
            loss.backward()  # type: ignore[no-untyped-call]
    return allocations.peak


def _move_to_cpu(model: LanguageModel) -> None:
    """Replace the tensors of a model without memory by fake ones of a CPU; each gradient of a weight is dropped."""
    for module in model.modules():
        for name, weight in module.named_parameters(recurse=False):
            fake = nn.Parameter(torch.empty(weight.shape, dtype=weight.dtype))
            fake.register_post_accumulate_grad_hook(_drop_gradient)
            setattr(module, name, fake)
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, torch.empty(buffer.shape, dtype=buffer.dtype))


def _drop_gradient(weight: nn.Parameter) -> None:
    weight.grad = None
