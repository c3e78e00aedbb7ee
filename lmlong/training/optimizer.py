"""The optimizer of a run, and its learning rate schedule."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from lmlong import recipe
from lmlong.training.muon import Muon


def parameter_groups(model: nn.Module, options: recipe.Training) -> list[dict[str, Any]]:
    """Return the weights in the order in which a checkpoint numbers them: the embedding and the matrices of linear
    layers, which decay, and the others. Groups with `stacks` are for Muon."""
    linear = {id(module.weight): module for module in model.modules() if isinstance(module, nn.Linear)}
    embedded = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    weights = list(model.parameters())
    matrices = [weight for weight in weights if id(weight) in linear]
    others = [weight for weight in weights if id(weight) not in linear and id(weight) not in embedded]
    decay = options.weight_decay
    stacks = [getattr(linear[id(weight)], "heights", [len(weight)]) for weight in matrices]
    groups: list[dict[str, Any]] = [
        {"params": [weight for weight in weights if id(weight) in embedded], "weight_decay": decay},
        {"params": matrices, "weight_decay": decay, **({"stacks": stacks} if options.optimizer != "adamw" else {})},
        {"params": others, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def make_optimizer(model: nn.Module, options: recipe.Training) -> torch.optim.Optimizer:
    """Return the optimizer of a recipe."""
    groups, betas = parameter_groups(model, options), (options.beta1, options.beta2)
    if options.optimizer != "adamw":
        dtype = torch.bfloat16 if options.precision == "bf16" else torch.float32
        return Muon(groups, options.learning_rate, betas, dtype)
    return torch.optim.AdamW(groups, lr=options.learning_rate, betas=betas)


def moments_of(group: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of what the optimizer keeps for each weight of a group."""
    return ("momentum",) if "stacks" in group else ("step", "exp_avg", "exp_avg_sq")


def make_schedule(optimizer: torch.optim.Optimizer, options: recipe.Training, steps: int) -> LambdaLR:
    """Return the schedule, a function of the step alone, so that a resumed run is on it wherever it starts."""
    return LambdaLR(optimizer, lambda step: learning_rate_factor(step, steps, options))


def learning_rate_factor(step: int, steps: int, options: recipe.Training) -> float:
    """Return the share of the peak learning rate at a step (from 0) of a run of `steps`."""
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
"""Steps that no run takes, for one that ends by time alone."""


def count_steps(options: recipe.Training, tokens_per_step: int) -> int:
    """Return the optimizer steps of a run, from `steps` or `tokens`, whichever ends first; `minutes` may end it
    before."""
    ends = [ENDLESS]
    if options.steps is not None:
        ends.append(options.steps)
    if options.tokens is not None:
        ends.append(max(1, -(-options.tokens // tokens_per_step)))
    return min(ends)
