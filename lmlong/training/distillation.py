"""Distillation: a model learns the predictions of a trained one, its teacher, or the outputs of the teacher's layers.

B batch, T time, N tokens, V vocabulary.
"""

from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lmlong import recipe
from lmlong.checkpoint import manifest, read
from lmlong.data.tokenizers.base import Tokenizer
from lmlong.errors import UsageError
from lmlong.model.base import TextModel
from lmlong.model.block import with_states
from lmlong.model.language_model import LanguageModel
from lmlong.model.loss import (
    IGNORED,
    chunked_cross_entropy,
    in_float32,
    logits_in_float32,
    nll_and_log_total,
    nll_gradient,
)
from lmlong.model.segments import loss_in_segments

ERROR_EPSILON = 1e-4
"""Added to the mean square of the teacher's output, so that tokens to which a layer adds nothing do not dominate the
error."""


class Softening(NamedTuple):
    """How a student learns from the predictions of a teacher."""

    share: float  # weight of the teacher's distribution in the loss; the rest is the text's
    temperature: float


class TeacherOutput(NamedTuple):
    """The predictions of a teacher that has just read the batch."""

    hidden: Tensor  # (B, T, width) the teacher's last hidden states, or (N, width) those of some tokens
    weight: Tensor  # (V, width) of its output layer
    softening: Softening

    def student_loss(self, logits: Tensor, targets: Tensor, span: slice, graded: bool) -> tuple[Tensor, Tensor | None]:
        """Return the student's loss on a span of the flattened tokens (N,) with the summed -log p of the targets, (2,),
        and the gradient of the first for the logits (N, V).

        The student's loss mixes the sum with KL(teacher | student) at a temperature, multiplied by the squared
        temperature so that it does not scale the gradient (Hinton et al. 2015).
        """
        x, share = in_float32(logits), self.softening.share
        nll, log_total = nll_and_log_total(x, targets)
        soft_loss, dsoft = self._soft_loss(x, targets != IGNORED, span)
        gradient = dsoft.add_(nll_gradient(x, log_total, targets), alpha=1 - share) if graded else None
        return torch.stack([(1 - share) * nll.sum() + soft_loss, nll.sum()]), gradient

    def _soft_loss(self, logits: Tensor, scored: Tensor, span: slice) -> tuple[Tensor, Tensor]:
        """Return the weighted KL(teacher | student) over the scored tokens of a span, and its gradient for the
        logits."""
        share, temperature = self.softening
        log_q = _log_softmax(logits_in_float32(self.hidden[span], self.weight).div_(temperature))
        log_p = _log_softmax(logits / temperature)
        q = log_q.exp()
        divergence = torch.linalg.vecdot(q, log_q.sub_(log_p))[:, None].where(scored[:, None], 0).sum()
        dlogits = log_p.exp_().sub_(q).mul_(scored[:, None] * (share * temperature))
        return share * temperature**2 * divergence, dlogits


def _log_softmax(logits: Tensor) -> Tensor:
    """Return log(softmax(logits)), in their memory."""
    return logits.sub_(logits.logsumexp(-1, keepdim=True))


class Teacher(NamedTuple):
    """A frozen language model. A student learns its predictions, or without `soft` the outputs of its layers.

    Its weights are not part of the student's checkpoints.
    """

    model: LanguageModel
    soft: Softening | None
    tokenizer: Tokenizer
    weights_hash: str

    @torch.no_grad()
    def hidden_states(self, tokens: Tensor, document_starts: Tensor | None = None) -> Tensor:
        """Return the last hidden states (B, T, width), read piece by piece from an empty state."""
        state, pieces, size = self.model.init_state(len(tokens)), [], self.model.piece(len(tokens))
        for begin in range(0, tokens.shape[1], size):
            piece = slice(begin, begin + size)
            starts = None if document_starts is None else document_starts[:, piece]
            hidden, state = self.model(tokens[:, piece], state, starts)
            pieces.append(hidden)
        return torch.cat(pieces, dim=1)


def load_teacher(options: recipe.Training) -> Teacher | None:
    """Return the teacher that a recipe names, if any."""
    if options.teacher is None:
        return None
    softening = Softening(options.teacher_share, options.teacher_temperature)
    soft = softening if options.teacher_of == "predictions" else None
    return read.reading(options.teacher, lambda checkpoint: _load(checkpoint, options.teacher, soft))


def _load(checkpoint: Path, name: str | None, soft: Softening | None) -> Teacher:
    _, tokenizer, model = read.read_model(checkpoint)
    if not isinstance(model, LanguageModel) or model.labels is not None:
        what = "predicts labels, not" if model.labels else "is an encoder, which does not predict"
        raise UsageError(f"training.teacher: {name} {what} next tokens. Name another run.")
    weights_hash = manifest.read(checkpoint).files[manifest.WEIGHTS]["sha256"]
    return Teacher(model.eval().requires_grad_(False), soft, tokenizer, weights_hash)


def train_mixers_alone(student: TextModel, teacher: LanguageModel) -> None:
    """Freeze all weights of a student except its mixers', which learn the outputs of a teacher's."""
    assert isinstance(student, LanguageModel)
    (layers, width), (teacher_layers, teacher_width) = (
        (len(model.blocks), model.embedding.embedding_dim) for model in (student, teacher)
    )
    if (layers, width) != (teacher_layers, teacher_width):
        raise UsageError(
            f"training.teacher_of: the teacher has {teacher_layers} layers of width {teacher_width}, the model "
            f"{layers} of width {width}. To learn its layers, both must match; otherwise leave out teacher_of."
        )
    if student.hourglass or teacher.hourglass:
        raise UsageError("training.teacher_of: layers cannot be learned with downsampling. Leave it out.")
    student.requires_grad_(False)
    for block in student.blocks:
        block.mixer.requires_grad_(True)


def train_ngram_alone(model: LanguageModel) -> None:
    """Freeze all weights of a model except its added n-gram heads."""
    model.requires_grad_(False)
    for block in model.blocks:
        if block.ngram is not None:
            block.ngram.requires_grad_(True)


def taught_loss(
    model: LanguageModel,
    tokens: Tensor,
    targets: Tensor,
    document_starts: Tensor,
    state: Any = None,
    *,
    teacher: Teacher,
    segment: int | None = None,
) -> tuple[Tensor, Any]:
    """Return the loss to minimize and the reported loss, (2,), and the state after the tokens.

    The reported loss is the summed -log p of the targets; if the layers of a teacher are learned, their mean error
    times the number of targets.
    """
    if teacher.soft is None:
        error = layer_errors(model, teacher.model, tokens, document_starts).mean()
        return torch.stack([error * targets.numel(), error.detach() * (targets != IGNORED).sum()]), None
    output = TeacherOutput(teacher.hidden_states(tokens, document_starts), teacher.model.lm_head.weight, teacher.soft)

    def loss_of(hidden: Tensor, span: slice) -> Tensor:
        of_chunk = output._replace(hidden=output.hidden[:, span].flatten(0, -2)).student_loss
        policy = model.policy_for(hidden)
        return model.lm_head(
            hidden, partial(chunked_cross_entropy, targets=targets[:, span], policy=policy, of_chunk=of_chunk)
        )

    return loss_in_segments(model, tokens, document_starts, state, loss_of, segment)


def layer_errors(
    student: LanguageModel, teacher: LanguageModel, tokens: Tensor, document_starts: Tensor | None
) -> Tensor:
    """Return the squared error of each student mixer relative to the teacher's output, averaged over all tokens (B, T).

    Both mixers read the input of the teacher's layer; no gradient passes between layers.
    """
    state, teacher_state = (model.init_state(len(tokens)) for model in (student, teacher))
    _, stretch = student.embed(tokens, state, document_starts)
    with torch.no_grad():
        x, teacher_stretch = teacher.embed(tokens, teacher_state, document_starts)
    errors = []
    layers = with_states(student.blocks, state.blocks)
    teacher_layers = with_states(teacher.blocks, teacher_state.blocks)
    for (block, (inner, *_)), (teacher_block, (teacher_inner, *added)) in zip(layers, teacher_layers, strict=True):
        with torch.no_grad():
            target, _ = teacher_block.mixer(x, teacher_inner, teacher_stretch)
        if student.activation_checkpointing and torch.is_grad_enabled():
            output, _ = checkpoint(block.mixer, x, inner, stretch, use_reentrant=False)
        else:
            output, _ = block.mixer(x, inner, stretch)
        target32, output32 = (y.to(torch.promote_types(y.dtype, torch.float32)) for y in (target, output))
        error = (output32 - target32).square().mean(-1) / (target32.square().mean(-1) + ERROR_EPSILON)
        errors.append(error.mean())
        with torch.no_grad():
            x, _ = teacher_block.finish(x, target, tuple(added), teacher_stretch)
    return torch.stack(errors)
