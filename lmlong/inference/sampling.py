"""From logits to the next token: a distribution, computed by a pure function, and a seeded random number to sample from
it.

B batch, V vocabulary.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from lmlong.inference.session import NO_TOKEN
from lmlong.model.device import as_float64
from lmlong.model.finite import NotFinite
from lmlong.model.loop_guard import LoopGuard, lower_loops
from lmlong.model.sampling_options import Sampling


class Sampler:
    """A sampler of the next token of each row of a batch, from the first generated token on.

    The loop penalty applies to the tokens that it has sampled. A row draws the same random numbers whatever the other
    rows are.
    """

    def __init__(self, options: Sampling, rows: Sequence[tuple[int, ...]] = ((0,),), eos: int | None = None):
        """Create a sampler; `rows` are numbers for each row that its draws depend on, in addition to the seed. `eos` is
        needed for `ignore_eos`."""
        self.options = options
        self.excluded = eos if options.ignore_eos else None
        self._random = [np.random.default_rng([options.seed, *row]) for row in rows]
        self._guards = [LoopGuard(options) for _ in rows if options.effective_loop_penalty]

    def __call__(self, logits: Tensor, recent: Tensor | None = None) -> Tensor:
        """Return tokens (B,) from logits (B, V) and recent tokens (B, any), with NO_TOKEN before the beginning."""
        check_finite(logits)
        return _sampled(self.options, self.excluded, self._random, self._guards, logits, recent)

    @property
    def needs_recent(self) -> bool:
        """Whether the sampler needs the recent tokens, including the prompt's."""
        return self.options.repetition_penalty != 1

    def choose(self, log_weights: Sequence[float], row: int) -> int:
        """Choose one of several beginnings of a row's text by their log-probabilities, and return its index."""
        weights = torch.tensor([log_weights], dtype=torch.float64)
        if self.options.temperature == 0 or len(log_weights) == 1:
            return int(weights.argmax())
        uniform = torch.tensor([self._random[row].random()], dtype=torch.float64)
        return int(draw(tempered(weights, self.options.temperature), uniform))


def check_finite(logits: Tensor) -> None:
    """Raise NotFinite if logits (B, V) have NaN or inf as their maximum."""
    if not all(map(math.isfinite, logits.amax(-1).tolist())):
        raise NotFinite()


def sample_each(samplers: Sequence[Sampler], logits: Tensor, recent: Sequence[Tensor | None]) -> Tensor:
    """Return tokens (B,) for rows of logits (B, V) that have a sampler each.

    `recent` are the recent tokens (1, any) of rows whose sampler needs them. Rows with the same options are drawn
    together.
    """
    groups: dict[Sampling, list[int]] = {}
    for row, sampler in enumerate(samplers):
        groups.setdefault(replace(sampler.options, seed=0), []).append(row)
    tokens = torch.empty(len(samplers), dtype=torch.long)
    for options, rows in groups.items():
        random = [random for row in rows for random in samplers[row]._random]
        last = [seen for row in rows if (seen := recent[row]) is not None]
        guards = [guard for row in rows for guard in samplers[row]._guards]
        together, excluded = torch.cat(last) if last else None, samplers[rows[0]].excluded
        tokens[rows] = _sampled(options, excluded, random, guards, logits[rows], together).cpu()
    return tokens


def _sampled(
    options: Sampling,
    excluded: int | None,
    randoms: Sequence[np.random.Generator],
    guards: Sequence[LoopGuard],
    logits: Tensor,
    recent: Tensor | None,
) -> Tensor:
    """Return a token for each row, drawn with the row's random generator; `guards` are those of all rows, or empty. The
    token `excluded` is not drawn."""
    if excluded is not None:
        logits = logits.index_fill(-1, torch.tensor(excluded, device=logits.device), -torch.inf)
    if recent is not None and options.repetition_penalty != 1:
        logits = penalised(logits, recent[:, -options.repetition_window :], options.repetition_penalty)
    if guards:
        logits = lower_loops(logits, guards)
    if options.temperature == 0:
        tokens = logits.argmax(-1)
    else:
        uniform = torch.from_numpy(np.array([random.random() for random in randoms]))
        tokens = draw(probabilities(logits, options), uniform)
    for guard, token in zip(guards, tokens.tolist() if guards else [], strict=True):
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
    return ((logits - logits.amax(-1, keepdim=True)) / temperature).softmax(-1)


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


def draw(probs: Tensor, uniform: Tensor) -> Tensor:
    """Return a token for each row (B, V) by inverse transform sampling, from a number in [0, 1) for each row (B,)."""
    cumulative = probs.cumsum(-1)
    drawn = uniform.to(cumulative.device)[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, drawn, right=True)[:, 0]
