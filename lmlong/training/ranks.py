"""Several processes that train one model: which of them speaks, and numbers that all of them know."""

import os

import torch
from lightning.pytorch import Trainer

from lmlong.model.scoring import Totals


def is_first() -> bool:
    """Whether this process is the one that writes and speaks, as its launcher has told it before training begins."""
    return int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0"))) == 0


def summed(trainer: Trainer, totals: Totals) -> Totals:
    """The totals of all ranks together; all must ask."""
    if trainer.world_size == 1:
        return totals
    numbers = torch.tensor([totals.nats, totals.tokens, totals.bytes], dtype=torch.float64)
    nats, tokens, size = trainer.strategy.reduce(numbers.to(trainer.strategy.root_device), reduce_op="sum").tolist()
    return Totals(nats, round(tokens), round(size))


def largest(trainer: Trainer, number: int) -> int:
    """The largest of the ranks' numbers; all must ask."""
    if trainer.world_size == 1:
        return number
    held = torch.tensor(number, device=trainer.strategy.root_device)
    return int(trainer.strategy.reduce(held, reduce_op="max"))
