"""From logits to the next token: a distribution, computed by a pure function, and a seeded random number to sample from
it.

B batch, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from lmlong.inference.session import NO_TOKEN, last_tokens
from lmlong.model.device import as_float64
from lmlong.model.loop_guard import LoopGuard, lower_loops
from lmlong.model.sampling_options import Sampling


class Sampler:
    """Draws the tokens of one text, with random numbers of its own. The loop penalty applies to the tokens that it has
    drawn."""

    def __init__(self, options: Sampling, numbers: Sequence[int] = (0,), eos: int | None = None):
        """The draws depend on the seed and on `numbers`. `eos` is needed for `ignore_eos`."""
        self.options = options
        self.distribution = replace(options, seed=0)
        """The options that determine the probabilities of tokens."""
        self.excluded = eos if options.ignore_eos else None
        self.random = np.random.default_rng([options.seed, *numbers])
        self.guards = [LoopGuard(options)] if options.effective_loop_penalty else []

    def choose(self, log_weights: Sequence[float]) -> int:
        """Choose one of several beginnings of the text by their log-probabilities, and return its index."""
        weights = torch.tensor([log_weights], dtype=torch.float64)
        if self.options.temperature == 0 or len(log_weights) == 1:
            return int(weights.argmax())
        return draw(tempered(weights, self.options.temperature), [self.random.random()])[0]


def sample(samplers: Sequence[Sampler], logits: Tensor, recent: Sequence[Sequence[int]] = ()) -> list[int]:
    """Return a token for each row of finite logits (B, V), drawn by the row's sampler. All samplers have the same
    `distribution`. `recent` are the last tokens of each row, which the repetition penalty needs."""
    options, excluded = samplers[0].distribution, samplers[0].excluded
    guards = [guard for sampler in samplers for guard in sampler.guards]
    if excluded is not None:
        logits = logits.index_fill(-1, torch.tensor(excluded, device=logits.device), -torch.inf)
    if recent and options.repetition_penalty != 1:
        last = [last_tokens(tokens, options.repetition_window) for tokens in recent]
        logits = penalised(logits, torch.tensor(last, device=logits.device), options.repetition_penalty)
    if guards:
        logits = lower_loops(logits, guards)
    if options.temperature == 0:
        tokens = logits.argmax(-1).tolist()
    else:
        tokens = draw(probabilities(logits, options), [sampler.random.random() for sampler in samplers])
    for guard, token in zip(guards, tokens if guards else [], strict=True):
        guard.append(token)
    return tokens


def probabilities(logits: Tensor, options: Sampling) -> Tensor:
    """Return unnormalized probabilities (B, V) of tokens in float64, 0 for excluded tokens."""
    probs = tempered(logits, options.temperature)
    if options.top_k is not None:
        probs = keep_top_k(probs, options.top_k)
    if options.top_p < 1:
        probs = keep_top_p(probs, options.top_p)
    if options.min_p > 0:
        probs = keep_min_p(probs, options.min_p)
    return probs


def penalised(logits: Tensor, recent: Tensor, penalty: float) -> Tensor:
    """Return logits with recent tokens penalized once each (Keskar et al. 2019), however often they occur."""
    spare = pad(logits, (0, 1))  # a spare column for NO_TOKEN
    positions = recent.where(recent != NO_TOKEN, logits.shape[-1])
    before = spare.gather(-1, positions)
    return spare.scatter(-1, positions, torch.where(before > 0, before / penalty, before * penalty))[..., :-1]


def tempered(logits: Tensor, temperature: float) -> Tensor:
    """Return softmax(logits / temperature), for any temperature above 0."""
    # float64 costs nothing beside the model; the maximum is subtracted so that a tiny temperature gives -inf at worst
    logits = as_float64(logits)
    return (logits - logits.amax(-1, keepdim=True)).div_(temperature).softmax(-1)


def keep_top_k(probs: Tensor, k: int) -> Tensor:
    """Keep the k likeliest tokens; on ties, the first in the vocabulary."""
    order = probs.argsort(dim=-1, descending=True, stable=True)
    return probs.scatter(-1, order[..., k:], 0.0)


def keep_top_p(probs: Tensor, share: float) -> Tensor:
    """Keep the fewest likeliest tokens whose probabilities sum to this share of the total; on ties, the first in the
    vocabulary."""
    ordered, order = probs.sort(dim=-1, descending=True, stable=True)
    mass = ordered.cumsum(-1)
    nucleus = share * mass[..., -1:]
    reached = torch.cat([torch.zeros_like(nucleus), mass[..., :-1]], dim=-1) >= nucleus  # before this token
    return probs.scatter(-1, order, ordered.masked_fill(reached, 0.0))


def keep_min_p(probs: Tensor, share: float) -> Tensor:
    """Keep tokens at least this share as likely as the likeliest."""
    return probs.masked_fill(probs < share * probs.amax(-1, keepdim=True), 0.0)


def draw(probs: Tensor, uniform: Sequence[float]) -> list[int]:
    """Return a token for each row (B, V) by inverse transform sampling, from a number in [0, 1) for each row."""
    cumulative = probs.cumsum(-1).cpu().numpy()  # a search by torch takes several times as long for a row
    rows = zip(cumulative, uniform, strict=True)
    return [int(row.searchsorted(number * row[-1], side="right")) for row, number in rows]
