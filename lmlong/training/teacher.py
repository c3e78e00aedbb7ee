"""A teacher: a trained model whose predictions another one learns, beside the text that both read.

B batch, T time.
"""

from typing import Any

import torch
from torch import Tensor

from lmlong.model.base import TextModel
from lmlong.model.language_model import PIECE, LanguageModel
from lmlong.model.loss import IGNORED, Softening, TeacherOutput
from lmlong.training.alignment import layer_errors


class Teacher:
    """A language model that is not trained, and how a student learns from it: its predictions, or without a softening
    its layers. It is no part of the student: neither its weights nor its memory are in any checkpoint."""

    def __init__(self, model: LanguageModel, soft: Softening | None):
        self.model, self.soft = model.eval().requires_grad_(False), soft

    @torch.no_grad()
    def hidden_states(self, tokens: Tensor, document_starts: Tensor | None = None) -> Tensor:
        """Return its last hidden states (B, T, width), read from an empty state piece by piece."""
        state, pieces = self.model.init_state(len(tokens)), []
        for begin in range(0, tokens.shape[1], PIECE):
            piece = slice(begin, begin + PIECE)
            starts = None if document_starts is None else document_starts[:, piece]
            hidden, state = self.model.hidden_states(tokens[:, piece], state, starts)
            pieces.append(hidden)
        return torch.cat(pieces, dim=1)


def taught_loss(
    model: TextModel,
    teacher: Teacher | None,
    tokens: Tensor,
    targets: Tensor,
    mask: Tensor,
    state: Any = None,
    segment: int | None = None,
) -> tuple[Tensor, Tensor, Any]:
    """Return the loss to minimize, the reported loss, and the state after. The reported loss is the summed -log p of
    the targets; where the layers of a teacher are learned, the mean of their errors for each target."""
    if teacher is None:
        losses, state = model.loss(tokens, targets, mask, state, segment)
        return losses, losses.detach(), state
    assert isinstance(model, LanguageModel)
    if teacher.soft is None:
        error = layer_errors(model, teacher.model, tokens, mask).mean()
        return error * targets.numel(), error.detach() * (targets != IGNORED).sum(), None
    output = TeacherOutput(teacher.hidden_states(tokens, mask), teacher.model.lm_head.weight, teacher.soft)
    losses, state = model.loss(tokens, targets, mask, state, segment, output)
    return losses[0], losses[1].detach(), state
