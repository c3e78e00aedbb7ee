"""The optimizer and the learning rate schedule of a run."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lmlong import recipe
from lmlong.attention.device_policy import CPU_POLICY, DevicePolicy
from lmlong.attention.inputs import GateProjection
from lmlong.model.base import TextModel
from lmlong.training.muon import BASE_WIDTH, Muon
from lmlong.training.row_adagrad import make_row_optimizer


def parameter_groups(model: TextModel, options: recipe.Training) -> list[dict[str, Any]]:
    """Return the groups of trained weights, in the order in which checkpoints number them.

    They are embeddings and the matrices of linear layers, which decay, then all other weights; with Muon, gate
    projections are a separate group. `stacks` are the heights of stacked matrices, for Muon.

    `lr_scale` makes a step change a layer's output by the same amount at any width. AdamW moves every entry of a vector
    by about the same amount, so its effect on a product grows with the width. The rate of a pretrained embedding of an
    encoder of labels grows with its size: it is so much larger than a new one that equal steps would hardly change it.
    """
    muon, decay = options.optimizer != "adamw", options.weight_decay
    modules, weights = list(model.modules()), [weight for weight in model.parameters() if weight.requires_grad]
    linear = {id(module.weight): module for module in modules if isinstance(module, nn.Linear)}
    gates = {id(module.projection) for module in modules if isinstance(module, GateProjection) and muon}
    embedded = {id(module.weight) for module in modules if isinstance(module, nn.Embedding)}
    separate = {*linear, *gates, *embedded}
    matrices = [weight for weight in weights if id(weight) in linear]
    # not by the shapes of weights, which DeepSpeed's stage 3 empties
    stacks = [getattr(linear[id(weight)], "heights", [linear[id(weight)].out_features]) for weight in matrices]
    scale = math.sqrt(BASE_WIDTH / model.embedding.embedding_dim) if muon else 1.0
    groups: list[dict[str, Any]] = [
        {"params": [w for w in weights if id(w) in embedded], "weight_decay": decay, "lr_scale": scale},
        {"params": matrices, "weight_decay": decay, "lr_scale": 1.0, **({"stacks": stacks} if muon else {})},
        {"params": [w for w in weights if id(w) not in separate], "weight_decay": 0.0, "lr_scale": 1.0},
        {"params": [w for w in weights if id(w) in gates], "weight_decay": 0.0, "lr_scale": scale},
    ]
    if model.embedding_growth is not None:
        (own, *rest), growth = groups[0]["params"], float(model.embedding_growth)
        scaled = {"params": [own], "weight_decay": decay / growth, "lr_scale": scale * growth}
        groups[:1] = [scaled, {**groups[0], "params": rest}]
    return [group | {"lr": options.learning_rate * group["lr_scale"]} for group in groups if group["params"]]


def make_optimizer(
    model: TextModel, options: recipe.Training, policy: DevicePolicy = CPU_POLICY, ranks: int = 1
) -> torch.optim.Optimizer:
    """Return the optimizer of a recipe, in one of the `ranks` of a run."""
    groups, betas = parameter_groups(model, options), (options.beta1, options.beta2)
    fused = masks_updates(options, policy)
    if options.optimizer != "adamw":
        dtype = torch.bfloat16 if options.precision == "bf16" else torch.float32
        return Muon(groups, betas, dtype, fused, ranks)
    return torch.optim.AdamW(groups, betas=betas, fused=fused or None)


def masks_updates(options: recipe.Training, policy: DevicePolicy) -> bool:
    """Return whether the optimizer skips an update by itself where its tensor `found_inf` is 1, as torch's fused
    kernels do, without a wait.

    On a CPU the gradients are left out instead. DeepSpeed and the gradient scaler of float16 skip updates by
    themselves.
    """
    return not policy.reads_values and options.strategy != "deepspeed" and options.precision != "16"


def moments_of(group: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the optimizer's moments for each weight of a group."""
    return ("momentum",) if "stacks" in group else ("step", "exp_avg", "exp_avg_sq")


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of each group of weights."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group["lr_scale"]


class LoopOptimizer:
    """The optimizers of a model and of its tables in a loop outside a run, such as a benchmark's."""

    def __init__(self, model: TextModel, options: recipe.Training, policy: DevicePolicy = CPU_POLICY):
        self.model, self.clip = model, options.clip
        self.weights = make_optimizer(model, options, policy)
        self.rows = make_row_optimizer(model, policy.reads_values)

    def step(self) -> Tensor:
        """Clip the gradient and update the model. Return the gradient's norm."""
        norm: Tensor = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.weights.step()
        self.weights.zero_grad()
        if self.rows:
            self.rows.step()
        return norm


def learning_rate_factor(step: int, steps: int, options: recipe.Training) -> float:
    """Return the learning rate at a step (from 0) of a run of `steps`, as a share of the peak."""
    warmup = min(options.warmup_steps, steps // 2)
    if step < warmup:
        return (step + 1) / warmup
    if options.schedule == "constant":
        return 1.0
    begin = warmup if options.schedule == "cosine" else max(warmup, steps - round(options.decay_fraction * steps))
    done = min(max(step - begin, 0) / max(steps - begin, 1), 1.0)
    left = (1 + math.cos(math.pi * done)) / 2 if options.schedule == "cosine" else 1 - done
    return options.final_learning_rate + (1 - options.final_learning_rate) * left


ENDLESS = 10**9
"""Number of steps that stands for no limit, in a run that ends only by time."""


def count_steps(options: recipe.Training, tokens_per_step: int, text_tokens: int) -> int:
    """Return the optimizer steps of a run by `steps`, `tokens` and `epochs` of a text, whichever ends first; `minutes`
    may end it earlier."""
    ends = [ENDLESS]
    if options.steps is not None:
        ends.append(options.steps)
    if options.tokens is not None:
        ends.append(max(1, -(-options.tokens // tokens_per_step)))
    if options.epochs is not None:
        ends.append(max(1, math.ceil(options.epochs * text_tokens / tokens_per_step)))
    return min(ends)
