"""AdamW and its learning rate schedule."""

import math

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from lmlong import recipe


def by_decay(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return the weights that decay, which are the matrices of linear layers and the embedding, and the others."""
    matrices = {id(m.weight) for m in model.modules() if isinstance(m, nn.Linear | nn.Embedding)}
    decayed = [weight for weight in model.parameters() if id(weight) in matrices]
    return decayed, [weight for weight in model.parameters() if id(weight) not in matrices]


def make_optimizer(model: nn.Module, options: recipe.Training) -> torch.optim.AdamW:
    """Return AdamW over the weights that decay and those that do not."""
    decayed, others = by_decay(model)
    groups = [
        {"params": decayed, "weight_decay": options.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=options.learning_rate, betas=(options.beta1, options.beta2))


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
