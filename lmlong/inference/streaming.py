"""Text as it is written: tokens drawn one by one from a state, then characters, then text up to a stop string."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import count

import torch
from torch import Tensor

from lmlong.inference.sampling import Sampler
from lmlong.model.language_model import LanguageModel, ModelState
from lmlong.text.tokenizer import Tokenizer

PIECE = 2048
"""Tokens of a prompt that are read at once: a prompt of any length takes the memory of one piece."""


def stream(
    model: LanguageModel,
    prompt: Sequence[int],
    sampler: Sampler,
    max_tokens: int | None,
    eos: int,
    state: ModelState | None = None,
) -> Iterator[int]:
    """The tokens that follow a prompt of at least one, read from `state`; they end before `eos` or at `max_tokens`."""
    for _ in count() if max_tokens is None else range(max_tokens):
        logits, state = read(model, prompt, state)
        token = int(sampler(logits))
        if token == eos:
            return
        yield token
        prompt = [token]


@torch.inference_mode()  # here and not in the generator, where it would stay on for the caller between two tokens
def read(model: LanguageModel, tokens: Sequence[int], state: ModelState | None) -> tuple[Tensor, ModelState]:
    """Continue over tokens in pieces of bounded size: logits (1, vocabulary) of what follows, and the state after."""
    device = model.embedding.weight.device
    for begin in range(0, len(tokens), PIECE):
        piece = torch.tensor([tokens[begin : begin + PIECE]], device=device)
        hidden, state = model.read(piece, state)
    assert state is not None, "nothing to read"
    return model.logits(hidden[:, -1]), state


def stream_text(tokens: Iterable[int], tokenizer: Tokenizer, stop: Sequence[str] = ()) -> Iterator[str]:
    """The text of tokens as they come, in pieces of whole characters, up to the first stop string."""
    return until(_characters(tokens, tokenizer), stop)


def until(pieces: Iterable[str], stop: Sequence[str]) -> Iterator[str]:
    """Text in pieces up to the stop string that is complete first; where the pieces are cut makes no difference."""
    held = ""
    for piece in pieces:
        held += piece
        if ends := [(begin + len(word), begin) for word in stop if (begin := held.find(word)) >= 0]:
            _, begin = min(ends)
            if begin:
                yield held[:begin]
            return
        ready = len(held) - _unfinished(held, stop)
        if ready:
            yield held[:ready]
            held = held[ready:]
    if held:
        yield held


def _characters(tokens: Iterable[int], tokenizer: Tokenizer) -> Iterator[str]:
    text = tokenizer.stream()
    for token in tokens:
        yield text.feed(token)
    yield text.finish()


def _unfinished(text: str, stop: Sequence[str]) -> int:
    """How many characters at the end of a text may still become a stop string."""
    lengths = (length for word in stop for length in range(1, len(word)) if text.endswith(word[:length]))
    return max(lengths, default=0)
