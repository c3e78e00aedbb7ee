"""A penalty on loops: on tokens that continue a third copy of a unit with which the generated text ends twice in a row,
or that write again and again the same few tokens, though not in the same order.

If the last n tokens equal the n tokens p positions earlier, with n >= p and n >= 2, the text ends with two copies of a
unit of p tokens (three if p = 1). The logit of the next token of a third copy is then lowered by
penalty * BASE ** (n - max(p, 2)). A loop becomes less likely with each token.

Near-loops alternate between a few units, such as newlines and quotes. If the last UNIT - 1 tokens occurred among the
last SPAN tokens with the same next token c times, c >= OFTEN, its logit is lowered by penalty * (c - OFTEN + 1). The
lines of a log or a table, which begin alike, repeat less often. Other repetition is not penalized.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from lmlong.model.sampling_options import RECENT, Sampling

BASE = 3.0
"""Growth of the penalty with each token of the third copy."""

SHORTEST = 2
"""Minimum number of repeated tokens: a token may occur three times in a row."""

UNIT, SPAN, OFTEN = 4, 256, 8
"""Tokens of a unit of a near-loop, and how often it may occur among how many tokens."""

LARGEST_PENALTY = 1e4
"""Large enough that a token is never drawn, but finite in every dtype."""

NO_TOKEN = -1


class LoopGuard:
    """The penalties for the next token of one growing text. A unit may have up to `window` tokens."""

    def __init__(self, options: Sampling, window: int = RECENT):
        self._penalty = options.effective_loop_penalty
        self._last = np.full(RECENT, NO_TOKEN)  # the last tokens, the newest first
        self._repeated = np.zeros(window, int)  # at index p - 1: how many of the last tokens equal the token p before
        self._needed = np.maximum(np.arange(1, window + 1), SHORTEST)

    def append(self, token: int) -> None:
        """Add a token to the text."""
        self._repeated += 1
        self._repeated *= self._last[: len(self._repeated)] == token
        self._last[1:] = self._last[:-1]
        self._last[0] = token

    def penalties(self) -> dict[int, float]:
        """Return the penalties to subtract from the logits, by token; other tokens have none."""
        if self._repeated.max() < SHORTEST:
            return {}
        lowered = {token: self._penalty * (count - OFTEN + 1) for token, count in self._often()}
        for index in (self._repeated >= self._needed).nonzero()[0].tolist():
            token, beyond = int(self._last[index]), int(self._repeated[index] - self._needed[index])
            lowered[token] = max(self._penalty * BASE ** min(beyond, 20), lowered.get(token, 0.0))
        return {token: min(penalty, LARGEST_PENALTY) for token, penalty in lowered.items()}

    def _often(self) -> list[tuple[int, int]]:
        """Return the tokens that often followed the last tokens, and how often."""
        same = self._repeated[:SPAN] >= UNIT - 1
        if np.count_nonzero(same) < OFTEN:
            return []
        tokens, counts = np.unique(self._last[: len(same)][same], return_counts=True)
        return [(int(token), int(count)) for token, count in zip(tokens, counts, strict=True) if count >= OFTEN]


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
