"""DRY ("don't repeat yourself"): a penalty on tokens that would repeat generated text.

Where the last n tokens of a text came before, the logit of the token that followed them there is lowered by
multiplier * base ** (n - allowed_length), if n is at least allowed_length. Short repeats, which any text has, stay
free, and a loop gets less likely with each of its tokens.
"""

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from lmlong.model.sampling_options import RECENT, Sampling

LARGEST_PENALTY = 1e4
"""Enough for a token never to be drawn, and finite in every dtype."""

LARGEST_EXPONENT = 100


class RepetitionGuard:
    """The penalties for the next token of one text, which grows. Earlier places count within its last `window` tokens.

    Each token costs a step for each earlier place of the same token.
    """

    def __init__(self, options: Sampling, window: int = RECENT):
        self._multiplier, self._base = options.effective_dry_multiplier, options.dry_base
        self._allowed_length, self._window = options.dry_allowed_length, window
        self._length = 0
        self._tokens: dict[int, int] = {}  # by position, those in the window
        self._positions: dict[int, deque[int]] = {}  # by token
        self._matches: dict[int, int] = {}  # by position: how many tokens before it are the same as the last ones

    def append(self, token: int) -> None:
        """Add a token to the text."""
        earlier = self._positions.setdefault(token, deque())
        self._matches = {position + 1: self._matches.get(position, 0) + 1 for position in earlier}
        earlier.append(self._length)
        self._tokens[self._length] = token
        self._length += 1
        if self._length > self._window:
            self._forget(self._length - self._window - 1)

    def penalties(self) -> dict[int, float]:
        """Return what to subtract from the logits of tokens; those of other tokens stay."""
        longest: dict[int, int] = {}
        for position, length in self._matches.items():
            if length >= self._allowed_length:
                token = self._tokens[position]
                longest[token] = max(length, longest.get(token, 0))
        return {token: self._penalty(length - self._allowed_length) for token, length in longest.items()}

    def _penalty(self, exponent: int) -> float:
        return min(self._multiplier * self._base ** min(exponent, LARGEST_EXPONENT), LARGEST_PENALTY)

    def _forget(self, position: int) -> None:
        """Drop the first token of the window."""
        token = self._tokens.pop(position)
        self._positions[token].popleft()
        if not self._positions[token]:
            del self._positions[token]


def lower_repeats(logits: Tensor, guards: Sequence[RepetitionGuard]) -> Tensor:
    """Return logits (B, V) without the penalties of each row's guard."""
    found = [(row, token, penalty) for row, guard in enumerate(guards) for token, penalty in guard.penalties().items()]
    if not found:
        return logits
    rows, tokens, penalties = zip(*found, strict=True)
    places = (torch.tensor(rows, device=logits.device), torch.tensor(tokens, device=logits.device))
    lowered = logits.clone()
    lowered[places] -= torch.tensor(penalties, dtype=logits.dtype, device=logits.device)
    return lowered
