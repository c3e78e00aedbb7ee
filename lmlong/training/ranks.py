"""Numbers that all processes which train one model know."""

import torch
from lightning.pytorch import Trainer
from torch import Tensor

from lmlong.model.scoring import Totals


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


def gathered(trainer: Trainer, tensor: Tensor) -> Tensor:
    """The tensors of all ranks, stacked, or that of the only one; all must ask."""
    if trainer.world_size == 1:
        return tensor
    every = trainer.strategy.all_gather(tensor.to(torch.uint8) if tensor.dtype == torch.bool else tensor)
    return every.to(tensor.dtype)


def own(trainer: Trainer, tensor: Tensor) -> Tensor:
    """This rank's part of what was gathered."""
    return tensor if trainer.world_size == 1 else tensor[trainer.global_rank]
