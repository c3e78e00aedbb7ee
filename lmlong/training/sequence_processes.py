"""Training by `training.sequence_parallel`: neighbouring ranks read the parts of the same rows.

B batch, T time.
"""

from torch import Tensor

from lmlong.attention.plugins import in_words
from lmlong.attention.tail import after_tail, tail_of
from lmlong.errors import UsageError
from lmlong.model.language_model import LanguageModel, ModelState
from lmlong.model.rope import document_positions
from lmlong.model.sequence_group import SequenceGroup, SequencePart


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
    hidden, after = model(tokens[:, own], entered, starts, part)
    return model.loss(hidden, targets[:, own]), after


def check_divides(model: LanguageModel) -> None:
    """Refuse a model with an attention that cannot read a part of a row."""
    for part in model.attention_parts:
        if not part.divides:
            raise UsageError(
                f"training.sequence_parallel: {in_words(part)} has no `effect`, by which the parts of a row would be "
                "put together. Define effect and after_effect, or leave sequence_parallel out."
            )
