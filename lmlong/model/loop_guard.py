"""A penalty on loops: on tokens that continue a third copy of a unit with which the generated text ends twice in a row,
or that write again and again the same few tokens, though not in the same order.

If the last n tokens equal the n tokens p positions earlier, with n >= p and n >= 2, the text ends with two copies of a
unit of p tokens (three if p = 1). The logit of the next token of a third copy is then lowered by
penalty * BASE ** (n - max(p, 2)). A loop becomes less likely with each token.

Near-loops alternate between a few units, such as newlines and quotes. If the last UNIT - 1 tokens occurred among the
last SPAN tokens with the same next token c times, c >= OFTEN, its logit is lowered by penalty * (c - OFTEN + 1). The
lines of a log or a table, which begin alike, repeat less often. Other repetition is not penalized.
"""

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from lmlong.model.sampling_options import RECENT, Sampling

BASE = 3.0
"""Growth of the penalty with each token of the third copy."""

SHORTEST = 2
"""Minimum number of repeated tokens: a token may occur three times in a row. Pairs of tokens are looked up."""

UNIT, SPAN, OFTEN = 4, 256, 8
"""Tokens of a unit of a near-loop, and how often it may occur among how many tokens."""

LARGEST_PENALTY = 1e4
"""Large enough that a token is never drawn, but finite in every dtype."""

MEMORY = 4 * RECENT
"""Tokens of a text that are kept at most."""


class LoopGuard:
    """The penalties for the next token of one growing text. A unit may have up to `window` tokens."""

    def __init__(self, options: Sampling, window: int = RECENT):
        self._penalty, self._window = options.effective_loop_penalty, window
        self._tokens: list[int] = []  # the last ones, up to MEMORY
        self._ends: dict[int, list[int]] = {}  # the indices at which each pair of tokens ends
        self._repeated: dict[int, int] = {}
        """How many of the last tokens equal those up to an earlier index, where it is SHORTEST or more."""

    def append(self, token: int) -> None:
        """Add a token to the text."""
        if len(self._tokens) == MEMORY:
            self._forget()
        self._tokens.append(token)
        end = len(self._tokens) - 1
        if end:
            ends = self._note_pair(end)
            before, begin = self._repeated, end - self._window
            self._repeated = {index: before.get(index - 1, 1) + 1 for index in ends if index >= begin}
            ends.append(end)

    def _note_pair(self, end: int) -> list[int]:
        """Return the indices at which the pair that ends at an index ends."""
        return self._ends.setdefault(self._tokens[end - 1] << 32 | self._tokens[end], [])

    def _forget(self) -> None:
        """Forget the tokens before those that a unit may reach to."""
        begin = MEMORY - self._window - 1
        self._tokens, self._ends = self._tokens[begin:], {}
        for end in range(1, len(self._tokens)):
            self._note_pair(end).append(end)
        self._repeated = {index - begin: repeated for index, repeated in self._repeated.items()}

    def penalties(self) -> dict[int, float]:
        """Return the penalties to subtract from the logits, by token; other tokens have none."""
        if not self._repeated:
            return {}
        end = len(self._tokens) - 1
        lowered = {token: self._penalty * (count - OFTEN + 1) for token, count in self._often(end)}
        for index, repeated in self._repeated.items():
            beyond = repeated - max(end - index, SHORTEST)
            if beyond >= 0:
                token = self._tokens[index + 1]
                lowered[token] = max(self._penalty * BASE ** min(beyond, 20), lowered.get(token, 0.0))
        return {token: min(penalty, LARGEST_PENALTY) for token, penalty in lowered.items()}

    def _often(self, end: int) -> list[tuple[int, int]]:
        """Return the tokens that often followed the last tokens, and how often."""
        long = (index for index, repeated in self._repeated.items() if repeated >= UNIT - 1 and end - index <= SPAN)
        followed = Counter(self._tokens[index + 1] for index in long)
        return [(token, count) for token, count in followed.items() if count >= OFTEN]


def lower_loops(logits: Tensor, guards: Sequence[LoopGuard]) -> Tensor:
    """Subtract the penalties of each row's guard from logits (B, V)."""
    lower = [(row, token, penalty) for row, guard in enumerate(guards) for token, penalty in guard.penalties().items()]
    if not lower:
        return logits
    rows, tokens, penalties = zip(*lower, strict=True)
    index = (torch.tensor(rows, device=logits.device), torch.tensor(tokens, device=logits.device))
    lowered = logits.clone()
    lowered[index] -= torch.tensor(penalties, dtype=logits.dtype, device=logits.device)
    return lowered
