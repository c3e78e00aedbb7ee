"""Read a text, and learn from it if its state does, document by document and block by block.

The model itself learns nothing: what reads text with a state that may learn calls these functions.

A block is BLOCK positions of a document, the first of which is a multiple of BLOCK. The hidden state at a position
predicts the token after it, so a block is learned from once the first token after the block is read.

B batch, T time, N positions, V vocabulary.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, pad

from lmlong.model.finite import is_finite, not_finite
from lmlong.model.language_model import LanguageModel, ModelState
from lmlong.model.learning.native import kernel as native
from lmlong.model.learning.state import (
    BLOCK,
    DEFAULT_RATES,
    NOT_LEARNED,
    SCALE_RATE,
    Delta,
    Learned,
    Rates,
    init_learned,
    keys_of,
    reset,
    will_learn_token,
)
from lmlong.model.loss import IGNORED
from lmlong.native.state import map_state

ReadBlocks = Callable[[Tensor, Delta, Tensor, Tensor, Tensor | None, Rates], Tensor | None]
"""`read_blocks` of native code or of torch."""


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


def first_state(model: LanguageModel, rows: int, learn: bool = False) -> ModelState:
    """Return the state before the first token. With `learn`, the output layer learns from the text that is read."""
    state = model.init_state(rows)
    return begin_learning(model, state) if learn else state


def begin_learning(model: LanguageModel, state: ModelState) -> ModelState:
    """Return the state with which the output layer learns from the text that follows."""
    learned = init_learned(state.position, like=model.embedding.weight)  # as large as the output matrix, in any format
    return state._replace(learned=learned)


def will_learn(state: ModelState, learn: bool) -> ModelState:
    """Return the state with which the model learns from the next token, or does not, if it learns from the text."""
    return state if state.learned is None else state._replace(learned=will_learn_token(state.learned, learn))


def read(
    model: LanguageModel, tokens: Tensor, state: ModelState, document_starts: Tensor | None = None
) -> tuple[Tensor, ModelState]:
    """Return the last hidden states (B, T, width) of a text, and the state after it."""
    hidden, after = model(tokens, unlearned(state), document_starts)
    if state.learned is not None:
        _, learned = learn(model, Text(tokens, hidden, state.position, document_starts), None, state.learned)
        after = after._replace(learned=learned)
    return hidden, after


@torch.no_grad()
def score(
    model: LanguageModel,
    tokens: Tensor,
    targets: Tensor,
    state: ModelState | None = None,
    document_starts: Tensor | None = None,
) -> tuple[Tensor, ModelState]:
    """Return -log p of each target (B, T), 0 if ignored, and the state after `tokens` (B, T). Raise NotFinite if a
    value is not finite."""
    state = model.init_state(len(tokens)) if state is None else state
    hidden, after = model(tokens, unlearned(state), document_starts)
    if state.learned is None:
        scored = targets != IGNORED
        nll = model.lm_head(hidden[scored], targets=targets[scored], reduction="none")
        nll = nll.new_zeros(targets.shape).masked_scatter(scored, nll)
    else:
        nll, learned = learn(model, Text(tokens, hidden, state.position, document_starts), targets, state.learned)
        after = after._replace(learned=learned)
    if not is_finite(nll):
        raise not_finite(model, tokens, unlearned(state), document_starts)
    return nll, after


def unlearned(state: ModelState) -> ModelState:
    """Return the state without what was learned, as the model itself reads it."""
    return state if state.learned is None else state._replace(learned=None)


def learn(model: LanguageModel, text: Text, targets: Tensor | None, learned: Learned) -> tuple[Tensor, Learned]:
    """Return -log p of each target (B, T), 0 if ignored, and what was learned after the last token of a text. Without
    targets, only learn."""
    with _exact(text.hidden):
        weight, after = _weight(model, learned), map_state(Tensor.clone, learned)
        rates, nll, read_part = _rates(model), weight.new_zeros(text.tokens.shape), _kernel(weight)
        for part in _parts(text, learned, after):
            scored = None
            if targets is not None:
                scored = pad(targets[part.row, part.new], (part.old, 0), value=IGNORED)
            of_part = read_part(weight, part.delta, part.hidden, part.targets, scored, rates)
            if of_part is not None:
                nll[part.row, part.new] = of_part[part.old :]
        return nll, after


def step_learned(
    model: LanguageModel, token: Tensor, hidden: Tensor, logits: Tensor, position: Tensor, learned: Learned
) -> tuple[Tensor, Learned]:
    """Return the logits (B, V) after `token` (B,) at `position` (B,) by what was learned from the text, and what is
    learned after it. `hidden` (B, width) and `logits` are those of the model alone."""
    tokens, positions, skips = token.tolist(), position.tolist(), learned.skip.tolist()
    hidden = hidden.detach().to(learned.hidden.dtype)
    delta, block, targets = learned.delta, learned.hidden.clone(), learned.targets.clone()
    for row, (following, known, skip) in enumerate(zip(tokens, positions, skips, strict=True)):
        if known and not skip:
            targets[row, (known - 1) % BLOCK] = following
    ended = [row for row, known in enumerate(positions) if known and known % BLOCK == 0]
    if ended:
        delta = _end_blocks(model, learned._replace(hidden=block, targets=targets), ended)
        targets[ended], block[ended] = NOT_LEARNED, 0
    for row, known in enumerate(positions):
        block[row, known % BLOCK] = hidden[row]
    skip_next = torch.zeros_like(learned.skip) if any(skips) else learned.skip
    return logits + change_of_logits(delta, hidden), Learned(delta, block, targets, skip_next)


def _end_blocks(model: LanguageModel, learned: Learned, ended: list[int]) -> Delta:
    """Return what was learned after the blocks of some rows have ended."""
    delta = learned.delta
    if not bool((learned.targets[ended] != NOT_LEARNED).any()):  # only the scale changes
        scale = delta.scale.clone()
        scale[ended, 0] = scale[ended, 1]
        return delta._replace(scale=scale)
    with _exact(learned.hidden):
        delta, weight, rates = map_state(Tensor.clone, delta), _weight(model, learned), _rates(model)
        for row in ended:  # and a position after the block, of which nothing is learned yet
            block, following = learned.hidden[row], pad(learned.targets[row], (0, 1), value=NOT_LEARNED)
            _kernel(weight)(weight, _row(delta, row), pad(block, (0, 0, 0, 1)), following, None, rates)
    return delta


def _weight(model: LanguageModel, learned: Learned) -> Tensor:
    """Return the weight of the output layer (V, width), dequantized."""
    dtype = learned.delta.bias.dtype
    return model.lm_head.matrix(dtype).to(dtype)


def _rates(model: LanguageModel) -> Rates:
    """Return the rates for the hidden states of a model."""
    return DEFAULT_RATES.for_hidden(model.norm.weight)


@contextmanager
def _exact(like: Tensor) -> Iterator[None]:
    """Return a context without gradients and without autocast."""
    with torch.no_grad(), torch.autocast(like.device.type, enabled=False):
        yield


def read_blocks(
    weight: Tensor, delta: Delta, hidden: Tensor, targets: Tensor, scored: Tensor | None, rates: Rates
) -> Tensor | None:
    """Learn from positions (N) of one document as native/kernel.py does, in torch."""
    nll, learned_from = None if scored is None else hidden.new_zeros(len(scored)), (len(hidden) - 1) // BLOCK
    for number, begin in enumerate(range(0, len(hidden), BLOCK)):
        block = slice(begin, begin + BLOCK)
        logits = _logits(weight, delta, hidden[block])
        if scored is not None and nll is not None:
            nll[block] = cross_entropy(logits, scored[block], ignore_index=IGNORED, reduction="none")
        if number < learned_from:
            _update(delta, hidden[block], targets[block], logits, rates)
    return nll


def change_of_logits(delta: Delta, hidden: Tensor) -> Tensor:
    """Return what is added to the logits (B, V) after hidden states (B, width)."""
    D, bias, _, scale, _ = delta
    if len(D) == 1 and _is_native(D):
        return native.change_of_logits(delta, hidden)
    with _exact(hidden):
        return scale[:, :1] * (bias + (D @ keys_of(hidden, D)[:, :, None])[..., 0])


def _kernel(weight: Tensor) -> ReadBlocks:
    """Return the function that reads blocks: native code on a CPU, else torch."""
    return native.read_blocks if _is_native(weight) else read_blocks


def _is_native(weight: Tensor) -> bool:
    return weight.device.type == "cpu" and weight.dtype == torch.float32 and native.library() is not None


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
            yield Part(row, new, old, hidden, targets, delta)
            learned_from = (len(hidden) - 1) // BLOCK * BLOCK
            hidden, targets, skip = hidden[learned_from:], targets[learned_from:], False
        for x, rest, nothing in ((after.hidden[row], hidden, 0), (after.targets[row], targets, NOT_LEARNED)):
            x[: len(rest)], x[len(rest) :] = rest, nothing
    after.skip[:] = False


def _spans(text: Text, row: int) -> Iterator[tuple[slice, bool]]:
    """Yield the tokens of each document in a row, and whether the document starts there."""
    starts = [] if text.document_starts is None else text.document_starts[row].nonzero()[:, 0].tolist()
    for begin, end in zip([0, *starts], [*starts, text.tokens.shape[1]], strict=True):
        if begin < end:
            yield slice(begin, end), begin in starts


def _logits(weight: Tensor, delta: Delta, hidden: Tensor) -> Tensor:
    D, bias, *_, scale, _ = delta
    change = torch.addmm(bias, keys_of(hidden, D), D.mT)
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
    dD = errors.mT @ keys_of(hidden, D)
    slope = slope + torch.linalg.vecdot(D.flatten(), dD.flatten())
    D.addcmul_(share[:, None], dD, value=-rates.rate)
    slopes += slope.square()
    scale.copy_(torch.stack([scale[1], (scale[1] - SCALE_RATE * slope * slopes.rsqrt()).clamp(0, 1)]))


def _row(delta: Delta, row: int) -> Delta:
    return map_state(lambda x: x[row], delta)
