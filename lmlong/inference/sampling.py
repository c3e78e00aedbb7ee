"""From logits to the next token: a distribution, which is a pure function, and one seeded number to sample from it.

B batch, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from lmlong.errors import LmlongError, UsageError
from lmlong.inference.session import NO_TOKEN, RECENT
from lmlong.model.device import as_float64


@dataclass(frozen=True)
class Sampling:
    """The options of sampling. The penalty acts first, then the temperature, top-k, top-p and min-p, each on what the
    one before it left."""

    temperature: float = 0.8
    """Divisor of the logits; below 1 likely tokens become likelier, and 0 always takes the likeliest."""
    top_k: int | None = None
    """Draw only from this many likeliest tokens."""
    top_p: float = 1.0
    """Draw only from the fewest likeliest tokens that together have this probability."""
    min_p: float = 0.0
    """Draw only from tokens at least this share as probable as the likeliest."""
    repetition_penalty: float = 1.0
    """Factor that makes tokens of the recent text less likely: it divides their logits, or multiplies negative ones."""
    repetition_window: int = 256
    """Length of the recent text in tokens."""
    seed: int = 0
    """Seed of the random draws: the same seed draws the same text."""

    def __post_init__(self) -> None:
        limits = {
            "temperature": (0 <= self.temperature < float("inf"), "a number from 0 up"),
            "top_k": (self.top_k is None or self.top_k >= 1, "a whole number from 1 up"),
            "top_p": (0 < self.top_p <= 1, "a number above 0 and at most 1"),
            "min_p": (0 <= self.min_p <= 1, "a number from 0 to 1"),
            "repetition_penalty": (0 < self.repetition_penalty < float("inf"), "a number above 0"),
            "repetition_window": (1 <= self.repetition_window <= RECENT, f"a whole number from 1 to {RECENT}"),
            "seed": (self.seed >= 0, "a whole number from 0 up"),
        }
        for name, (fits, wanted) in limits.items():
            if not fits:
                raise UsageError(f"{name}: {getattr(self, name)} is out of range. Give {wanted}.")


class Sampler:
    """A sampler of one token for each row of a batch; a row draws the same numbers whatever the other rows."""

    def __init__(self, options: Sampling, rows: Sequence[tuple[int, ...]] = ((0,),)):
        """Name each row by numbers, `rows`, that its draws depend on beside the seed."""
        self.options = options
        self._random = [np.random.default_rng([options.seed, *row]) for row in rows]

    def __call__(self, logits: Tensor, recent: Tensor | None = None) -> Tensor:
        """Return tokens (B,) from logits (B, V) and the last tokens (B, any), NO_TOKEN before the beginning."""
        check_finite(logits)
        return _sampled(self.options, self._random, logits, recent)

    @property
    def looks_back(self) -> bool:
        """Whether it needs the last tokens."""
        return self.options.repetition_penalty != 1

    def choose(self, log_weights: Sequence[float], row: int) -> int:
        """Return one of several beginnings of a row's text, by their log-probabilities."""
        weights = torch.tensor([log_weights], dtype=torch.float64)
        if self.options.temperature == 0 or len(log_weights) == 1:
            return int(weights.argmax())
        uniform = torch.tensor([self._random[row].random()], dtype=torch.float64)
        return int(draw(tempered(weights, self.options.temperature), uniform))


def check_finite(logits: Tensor) -> None:
    """Refuse logits (B, V) of unusable weights, such as NaN."""
    if not logits.amax(-1).isfinite().all():
        raise LmlongError("The model's logits are not finite: its weights are unusable. Use another checkpoint.")


def sample_each(samplers: Sequence[Sampler], logits: Tensor, recent: Sequence[Tensor | None]) -> Tensor:
    """Return a token (B,) for each row of logits (B, V), which has a sampler of its own, and `recent` tokens (1, any)
    where that looks back; rows with the same options are drawn together."""
    groups: dict[Sampling, list[int]] = {}
    for row, sampler in enumerate(samplers):
        groups.setdefault(replace(sampler.options, seed=0), []).append(row)
    tokens = torch.empty(len(samplers), dtype=torch.long)
    for options, rows in groups.items():
        random = [random for row in rows for random in samplers[row]._random]
        last = [seen for row in rows if (seen := recent[row]) is not None]
        tokens[rows] = _sampled(options, random, logits[rows], torch.cat(last) if last else None).cpu()
    return tokens


def _sampled(
    options: Sampling, randoms: Sequence[np.random.Generator], logits: Tensor, recent: Tensor | None
) -> Tensor:
    """Return a token for each row, drawn by a number of its own."""
    if recent is not None and options.repetition_penalty != 1:
        logits = penalised(logits, recent[:, -options.repetition_window :], options.repetition_penalty)
    if options.temperature == 0:
        return logits.argmax(-1)
    uniform = torch.tensor([random.random() for random in randoms], dtype=torch.float64)
    return draw(probabilities(logits, options), uniform)


def probabilities(logits: Tensor, options: Sampling) -> Tensor:
    """Return unnormalized probabilities (B, V) of tokens in float64, 0 for those left out."""
    probs = tempered(logits, options.temperature)
    if options.top_k is not None:
        probs = keep_top_k(probs, options.top_k)
    if options.top_p < 1:
        probs = keep_top_p(probs, options.top_p)
    if options.min_p > 0:
        probs = keep_min_p(probs, options.min_p)
    return probs


def penalised(logits: Tensor, recent: Tensor, penalty: float) -> Tensor:
    """Return logits with those of recent tokens lowered (Keskar et al. 2019), each once however often it occurs."""
    spare = pad(logits, (0, 1))  # a spare column for NO_TOKEN
    positions = recent.where(recent != NO_TOKEN, logits.shape[-1])
    found = spare.gather(-1, positions)
    return spare.scatter(-1, positions, torch.where(found > 0, found / penalty, found * penalty))[..., :-1]


def tempered(logits: Tensor, temperature: float) -> Tensor:
    """Return softmax(logits / temperature), for any temperature above 0."""
    # float64 costs nothing beside the model; the maximum is subtracted so that a tiny temperature gives -inf at worst
    logits = as_float64(logits)
    return ((logits - logits.amax(-1, keepdim=True)) / temperature).softmax(-1)


def keep_top_k(probs: Tensor, k: int) -> Tensor:
    """Keep the k likeliest; of equals the first in the vocabulary."""
    order = probs.argsort(dim=-1, descending=True, stable=True)
    return probs.scatter(-1, order[..., k:], 0.0)


def keep_top_p(probs: Tensor, share: float) -> Tensor:
    """Keep the fewest likeliest that sum to this share of the whole; of equals the first in the vocabulary."""
    ordered, order = probs.sort(dim=-1, descending=True, stable=True)
    mass = ordered.cumsum(-1)
    wanted = share * mass[..., -1:]
    reached = torch.cat([torch.zeros_like(wanted), mass[..., :-1]], dim=-1) >= wanted  # before this token
    return probs.scatter(-1, order, ordered.masked_fill(reached, 0.0))


def keep_min_p(probs: Tensor, share: float) -> Tensor:
    """Keep those at least this share as likely as the likeliest."""
    return probs.masked_fill(probs < share * probs.amax(-1, keepdim=True), 0.0)


def draw(probs: Tensor, uniform: Tensor) -> Tensor:
    """Return the token of each row (B, V) by inverse transform sampling, from a number in [0, 1) for each row (B,)."""
    line = probs.cumsum(-1)
    place = uniform.to(line.device)[:, None] * line[:, -1:]
    return torch.searchsorted(line, place, right=True)[:, 0]
