"""Predict tokens and learn from them, document by document and block by block.

A block is BLOCK positions of a document, the first of which is a multiple of BLOCK. The hidden state at a position
predicts the token after it, so a block is learned from once the first token after the block is read.

B batch, T time, N positions, V vocabulary.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, pad

from lmlong.model.learning.native import kernel as native
from lmlong.model.learning.state import BLOCK, NOT_LEARNED, SCALE_RATE, Delta, Learned, Rates, reset
from lmlong.model.loss import IGNORED
from lmlong.native.state import map_state


class Text(NamedTuple):
    """Tokens that the blocks of a model have read."""

    tokens: Tensor  # (B, T)
    hidden: Tensor  # (B, T, width) the last hidden state at each
    position: Tensor  # (B,) tokens of the current document before the first
    document_starts: Tensor | None = None  # (B, T)


class Part(NamedTuple):
    """Consecutive positions of one document, from the first of a block: `old` ones, which are not learned from yet, and
    those of new tokens. The delta is updated in place."""

    row: int
    new: slice  # of the text
    old: int
    hidden: Tensor  # (N, width)
    targets: Tensor  # (N,) the token after each, or NOT_LEARNED
    delta: Delta  # of this row

    @property
    def blocks(self) -> int:
        """The number of blocks to learn from."""
        return (len(self.hidden) - 1) // BLOCK


@torch.no_grad()
def read(weight: Tensor, text: Text, learned: Learned, rates: Rates) -> tuple[Tensor, Learned]:
    """Return the logits (B, T, V) after each token of a text, and what was learned after the last. `weight` (V, width)
    is that of the output layer."""
    logits, after = learned.delta.bias.new_empty(*text.tokens.shape, len(weight)), _copy(learned)
    for part in _parts(text, learned, after):
        for first, of_block in _block_logits(weight, part, rates):
            logits[part.row, part.new][first : first + len(of_block)] = of_block
    return logits, after


@torch.no_grad()
def score(weight: Tensor, text: Text, targets: Tensor | None, learned: Learned, rates: Rates) -> tuple[Tensor, Learned]:
    """Return -log p of each target (B, T), 0 if ignored, and what was learned after the last token of a text. Without
    targets, only learn."""
    nll, after = learned.delta.bias.new_zeros(text.tokens.shape), _copy(learned)
    by_native_code = weight.device.type == "cpu" and weight.dtype == torch.float32 and native.library() is not None
    read_part = native.read_blocks if by_native_code else read_blocks
    for part in _parts(text, learned, after):
        scored = None
        if targets is not None:
            scored = pad(targets[part.row, part.new], (part.old, 0), value=IGNORED)
        of_part = read_part(weight, part.delta, part.hidden, part.targets, scored, rates)
        if of_part is not None:
            nll[part.row, part.new] = of_part[part.old :]
    return nll, after


def read_blocks(
    weight: Tensor, delta: Delta, hidden: Tensor, targets: Tensor, scored: Tensor | None, rates: Rates
) -> Tensor | None:
    """Learn from positions (N) of one document as native/kernel.py does, in torch."""
    nll = None if scored is None else hidden.new_zeros(len(scored))
    part = Part(0, slice(0), 0, hidden, targets, delta)
    for first, logits in _block_logits(weight, part, rates):
        if scored is not None and nll is not None:
            block = slice(first, first + len(logits))
            nll[block] = cross_entropy(logits, scored[block], ignore_index=IGNORED, reduction="none")
    return nll


@torch.no_grad()
def step(weight: Tensor | None, text: Text, logits: Tensor, learned: Learned, rates: Rates) -> tuple[Tensor, Learned]:
    """Return the logits (B, V) after a text of one token in each row, and what was learned after it. `logits` are those
    of the model alone. The weight is needed only if the token ends a block."""
    tokens, hidden, position = text.tokens[:, 0], text.hidden[:, 0].to(learned.hidden.dtype), text.position
    is_full = ends_block(position)
    # the large tensors are copied only if a block is learned from
    after = _copy(learned) if bool(is_full.any()) else learned._replace(hidden=learned.hidden.clone())
    targets, rows = learned.targets.clone(), torch.arange(len(tokens), device=tokens.device)
    targets[rows, (position - 1) % BLOCK] = torch.where(learned.skip | (position == 0), NOT_LEARNED, tokens)
    for row in is_full.nonzero()[:, 0].tolist():
        assert weight is not None
        delta, block = _row(after.delta, row), after.hidden[row]
        _update(delta, block, targets[row], _logits(weight, delta, block), rates)
        after.hidden[row], targets[row] = 0, NOT_LEARNED
    after.hidden[rows, position % BLOCK] = hidden
    D, bias, _, scale, _ = after.delta
    change = bias if D is None else bias + (D @ hidden[:, :, None])[..., 0]
    return logits + scale[:, :1] * change, after._replace(targets=targets, skip=torch.zeros_like(learned.skip))


def ends_block(position: Tensor) -> Tensor:
    """Return whether a block is learned from once the tokens at these positions are read."""
    return (position > 0) & (position % BLOCK == 0)


def _parts(text: Text, learned: Learned, after: Learned) -> Iterator[Part]:
    """Yield the parts of a text, row by row. Put what is not learned from yet into `after`, a copy of `learned`."""
    for row, position in enumerate(text.position.tolist()):
        delta = _row(after.delta, row)
        old = (position - 1) % BLOCK + 1 if position else 0
        hidden, targets, skip = learned.hidden[row, :old], learned.targets[row, :old], bool(learned.skip[row])
        for new, starts_document in _spans(text, row):
            if starts_document:
                hidden, targets = hidden[:0], targets[:0]
                reset(delta)
            tokens = text.tokens[row, new]
            unknown = tokens.new_full((1,), NOT_LEARNED)
            if len(hidden):
                targets = torch.cat([targets[:-1], unknown if skip else tokens[:1]])
            hidden, targets, old = (
                torch.cat([hidden, text.hidden[row, new].to(hidden.dtype)]),
                torch.cat([targets, tokens[1:], unknown]),
                len(hidden),
            )
            part = Part(row, new, old, hidden, targets, delta)
            yield part
            hidden, targets, skip = hidden[part.blocks * BLOCK :], targets[part.blocks * BLOCK :], False
        for x, rest, nothing in ((after.hidden[row], hidden, 0), (after.targets[row], targets, NOT_LEARNED)):
            x[: len(rest)], x[len(rest) :] = rest, nothing
    after.skip[:] = False


def _spans(text: Text, row: int) -> Iterator[tuple[slice, bool]]:
    """Yield the tokens of each document in a row, and whether the document starts there."""
    starts = [] if text.document_starts is None else text.document_starts[row].nonzero()[:, 0].tolist()
    for begin, end in zip([0, *starts], [*starts, text.tokens.shape[1]], strict=True):
        if begin < end:
            yield slice(begin, end), begin in starts


def _block_logits(weight: Tensor, part: Part, rates: Rates) -> Iterator[tuple[int, Tensor]]:
    """Yield the logits of the new positions in each block, with the index of the first of them. Learn from a block once
    its logits are taken."""
    for number, (hidden, targets) in enumerate(zip(part.hidden.split(BLOCK), part.targets.split(BLOCK), strict=True)):
        first = number * BLOCK - part.old
        logits = _logits(weight, part.delta, hidden)
        yield max(first, 0), logits[max(-first, 0) :]
        if number < part.blocks:
            _update(part.delta, hidden, targets, logits, rates)


def _logits(weight: Tensor, delta: Delta, hidden: Tensor) -> Tensor:
    D, bias, *_, scale, _ = delta
    change = bias if D is None else torch.addmm(bias, hidden, D.mT)
    return hidden @ weight.mT + scale[0] * change


def _update(delta: Delta, hidden: Tensor, targets: Tensor, logits: Tensor, rates: Rates) -> None:
    """Learn from a block of positions, given their logits."""
    D, bias, squares, scale, slopes = delta
    is_learned = targets != NOT_LEARNED
    errors = logits.softmax(-1)
    errors[torch.arange(len(targets), device=targets.device), targets.where(is_learned, 0)] -= 1
    errors *= is_learned[:, None]
    squares += errors.square().sum(0)
    share = (1 + squares / rates.prior).rsqrt()
    dbias = errors.sum(0)
    slope = torch.dot(bias, dbias)
    bias.addcmul_(share, dbias, value=-rates.bias_rate)
    if D is not None:
        dD = errors.mT @ hidden
        slope = slope + torch.linalg.vecdot(D.flatten(), dD.flatten())
        D.addcmul_(share[:, None], dD, value=-rates.rate)
    slopes += slope.square()
    scale.copy_(torch.stack([scale[1], (scale[1] - SCALE_RATE * slope * slopes.rsqrt()).clamp(0, 1)]))


def _row(delta: Delta, row: int) -> Delta:
    return map_state(lambda x: x[row], delta)


def _copy(learned: Learned) -> Learned:
    return map_state(Tensor.clone, learned)
