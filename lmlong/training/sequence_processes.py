"""The processes of `training.sequence_parallel`: neighbouring ranks, which read the parts of the same rows."""

import torch
from torch import Tensor, distributed

from lmlong.attention.plugins import in_words
from lmlong.errors import UsageError
from lmlong.model.language_model import LanguageModel
from lmlong.model.sequence_group import SequenceGroup
from lmlong.training.collectives import all_gather, reduce_scatter


class SequenceProcesses(SequenceGroup):
    """The group of this process, among all processes of a run in groups of `size`. All create theirs together."""

    def __init__(self, rank: int, ranks: int, size: int):
        self.rank, self.size = rank % size, size
        for first in range(0, ranks, size):
            group = distributed.new_group(list(range(first, first + size)))  # all processes take part in this
            if first <= rank < first + size:
                self.group, self.first = group, first

    def gather(self, x: Tensor) -> Tensor:
        every = x.new_empty(self.size * x.numel())
        all_gather(every, x.contiguous().view(-1), self.group)
        return every.view(self.size, *x.shape)

    def sum_of_own(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32)).contiguous()
        own = wide.new_empty(wide[0].numel())
        reduce_scatter(own, wide.view(-1), group=self.group)
        return own.view(x.shape[1:]).to(x.dtype)

    def from_last(self, x: Tensor) -> Tensor:
        last = self.first + self.size - 1
        x = x.contiguous()
        distributed.broadcast(x, last, self.group)
        return x


def check_divides(model: LanguageModel) -> None:
    """Refuse a model with an attention that cannot read a part of a row."""
    for part in model.attention_parts:
        if not part.divides:
            raise UsageError(
                f"training.sequence_parallel: {in_words(part)} has no `effect`, by which the parts of a row would be "
                "put together. Define effect and after_effect, or leave sequence_parallel out."
            )
