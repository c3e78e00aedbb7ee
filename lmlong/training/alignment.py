"""How far the layers of a student are from those of a teacher, each given what the teacher's layer reads.

B batch, T time.
"""

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lmlong.model.language_model import LanguageModel

LEAST = 1e-4
"""Added to the mean square of an output, so that a token to which a layer adds nothing does not outweigh all others."""


def layer_errors(
    student: LanguageModel, teacher: LanguageModel, tokens: Tensor, document_starts: Tensor | None
) -> Tensor:
    """Return, for each layer, the squared error of the student's mixer relative to the teacher's output, the mean over
    all tokens (B, T). No gradient passes from one layer to another."""
    states = [model.init_state(len(tokens)) for model in (student, teacher)]
    _, positions = student.embed(tokens, states[0], document_starts)
    with torch.no_grad():
        x, their_positions = teacher.embed(tokens, states[1], document_starts)
    errors = []
    for ours, theirs, state, their_state in zip(
        student.blocks, teacher.blocks, states[0].blocks, states[1].blocks, strict=True
    ):
        with torch.no_grad():
            wanted, _ = theirs.mixer(x, their_state, their_positions)
        if student.activation_checkpointing and torch.is_grad_enabled():
            found, _ = checkpoint(ours.mixer, x, state, positions, use_reentrant=False)
        else:
            found, _ = ours.mixer(x, state, positions)
        wanted32, found32 = (y.to(torch.promote_types(y.dtype, torch.float32)) for y in (wanted, found))
        error = (found32 - wanted32).square().mean(-1) / (wanted32.square().mean(-1) + LEAST)
        errors.append(error.mean())
        with torch.no_grad():
            x = theirs.add(x, wanted)
    return torch.stack(errors)
