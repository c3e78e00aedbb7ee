"""Token healing: continue a prompt as the same text within a longer one would continue.

The last tokens of a prompt are those of a text that ends there, which a model has rarely seen: in its training text,
"of " and "the" were one token. So a session keeps the end of a prompt as text. The next token may cover the end of the
prompt: its beginning is drawn by probability, then the token itself, among the tokens that begin with the rest of the
prompt.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from lmlong.data.tokenizers.base import Tokenizer
from lmlong.data.tokenizers.boundaries import Cover, TokenBoundaries, settled
from lmlong.inference.sampling import Sampler
from lmlong.inference.session import (
    Session,
    advance,
    append_token,
    logits_not_finite,
    next_logits,
    prefill,
)
from lmlong.inference.unread import LONG, UnreadText, tokens_after
from lmlong.model.finite import is_finite
from lmlong.model.language_model import LanguageModel

WEIGHED_TOKENS = 32
"""Number of tokens before the end of a prompt among which the next token may begin; earlier tokens are fixed."""


class Start(NamedTuple):
    """A position where the next token can begin, within a prompt or at its end."""

    log_weight: float  # of the tokens since the unread text began, and of all tokens that may follow
    session: Session  # up to there
    cover: Cover  # the tokens since the unread text began, and the text from here to the end of the prompt


@torch.inference_mode()
def heal(model: LanguageModel, tokenizer: Tokenizer, session: Session, sampler: Sampler) -> Start:
    """Draw where the next token of a session begins."""
    text, session = session.unread, session._replace(unread=UnreadText())
    if text.chosen:  # by decode steps, as when they were generated, unless that would take long
        if len(text.chosen) > LONG and session.state.learned is None:
            read = prefill(model, [text.chosen], session)
        else:
            read = advance(model, session, [(token, False) for token in text.chosen])
        return Start(0.0, read, Cover(list(text.chosen), b""))
    candidates = starts(model, tokenizer, session, text)
    return candidates[sampler.choose([start.log_weight for start in candidates])]


def only_beginning_with(tokenizer: Tokenizer, heads: Sequence[bytes], logits: torch.Tensor) -> torch.Tensor:
    """Mask each row of logits (B, V) to the tokens that begin with its head."""
    if not any(heads):
        return logits
    allowed = torch.tensor([[not head] for head in heads]).repeat(1, logits.shape[1])
    for row, head in enumerate(heads):
        if head:
            allowed[row, tokenizer.boundaries.tokens_beginning_with(head)] = True
    return logits.masked_fill(~allowed.to(logits.device), -torch.inf)


def starts(model: LanguageModel, tokenizer: Tokenizer, session: Session, text: UnreadText) -> list[Start]:
    """Return all positions where the next token can begin, with their weights."""
    covers = [
        Cover(tokens_after(tokenizer, len(text.before), tokens), head)
        for tokens, head in tokenizer.boundaries.covers(text.text())
    ]
    fixed = covers[0].tokens[:-WEIGHED_TOKENS]
    covers = [cover for cover in covers if cover.tokens[: len(fixed)] == fixed]
    shared = covers[0].tokens[: settled(covers)]
    session = prefill(model, [shared], session)
    return list(_weigh(model, tokenizer.boundaries, session, covers, len(shared), 0.0))


def _weigh(
    model: LanguageModel,
    boundaries: TokenBoundaries,
    session: Session,
    covers: Sequence[Cover],
    length: int,
    log_weight: float,
) -> Iterator[Start]:
    """Iterate over the starts of covers that share their first `length` tokens, which `session` has read."""
    logits, state = next_logits(model, session)
    if not is_finite(logits.amax(-1)):
        raise logits_not_finite(model, session.recent)
    log_probs = logits[0].double().log_softmax(-1)
    following: dict[int, list[Cover]] = {}
    for cover in covers:
        if len(cover.tokens) > length:
            following.setdefault(cover.tokens[length], []).append(cover)
        else:
            log_mass = 0.0
            if cover.head:  # of all tokens that begin with it and are longer
                log_mass = float(log_probs[boundaries.tokens_beginning_with(cover.head)].logsumexp(-1))
            yield Start(log_weight + log_mass, session, cover)
    for token, group in following.items():
        more = append_token(session, state, token, learn=True)
        yield from _weigh(model, boundaries, more, group, length + 1, log_weight + float(log_probs[token]))
