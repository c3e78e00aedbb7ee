"""The processes of `training.sequence_parallel`: neighbouring ranks, which read the parts of the same rows.

B batch, T time.
"""

import torch
from torch import Tensor, distributed

from lmlong.attention.plugins import in_words
from lmlong.attention.tail import after_tail, tail_of
from lmlong.errors import UsageError
from lmlong.model.language_model import LanguageModel, ModelState
from lmlong.model.rope import document_positions
from lmlong.model.sequence_group import SequenceGroup, SequencePart
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


def loss_of_part(
    model: LanguageModel,
    tokens: Tensor,
    targets: Tensor,
    document_starts: Tensor | None,
    state: ModelState | None,
    group: SequenceGroup,
) -> tuple[Tensor, ModelState]:
    """Return the summed -log p of the targets (B, T) in this process's part of the rows, starting from `state`, and the
    state after this part. All processes of the group call this with the same rows."""
    state = model.init_state(len(tokens)) if state is None else state
    part = SequencePart(group, tokens.shape[1])
    own, before = part.own, slice(part.own.start)
    starts = None if document_starts is None else document_starts[:, own]
    position, last = state.position, state.last_tokens
    if before.stop:
        starts_before = None if document_starts is None else document_starts[:, before]
        position = document_positions(starts_before, position, before.stop)[:, -1] + 1
        last = None if last is None else after_tail(last, tail_of(tokens[:, before], last.shape[1]))
    entered = state._replace(position=position, last_tokens=last)
    hidden, after = model.hidden_states(tokens[:, own], entered, starts, part)
    return model.loss(hidden, targets[:, own]), after


def check_divides(model: LanguageModel) -> None:
    """Refuse a model with an attention that cannot read a part of a row."""
    for part in model.attention_parts:
        if not part.divides:
            raise UsageError(
                f"training.sequence_parallel: {in_words(part)} has no `effect`, by which the parts of a row would be "
                "put together. Define effect and after_effect, or leave sequence_parallel out."
            )
