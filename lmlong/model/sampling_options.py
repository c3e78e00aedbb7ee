"""The options of sampling and their defaults: the single table for Python, commands, server, web page and exports. It
does not import torch, so that commands can show it quickly."""

import secrets
from dataclasses import dataclass

from lmlong.errors import UsageError

MAX_TOKENS = 200
"""Default number of generated tokens."""

RECENT = 1024
"""Maximum number of last tokens that penalties on repetition consider."""

LOOP_PENALTY = 2.0
"""Default penalty on loops at temperatures above 0."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """The options of sampling. They are applied in this order: end of the document, repetition penalty, loop penalty,
    temperature, top-k, top-p, min-p."""

    temperature: float = 0.8
    """Divisor of the logits. Below 1, likely tokens become likelier; 0 always takes the likeliest."""
    top_k: int | None = None
    """Draw only from this many likeliest tokens."""
    top_p: float = 1.0
    """Draw only from the smallest set of likeliest tokens with at least this total probability."""
    min_p: float = 0.0
    """Draw only from tokens with at least this fraction of the likeliest token's probability."""
    repetition_penalty: float = 1.0
    """Factor that makes tokens of the recent text less likely: it divides their logits, or multiplies negative ones."""
    repetition_window: int = 256
    """Length of the recent text in tokens."""
    loop_penalty: float | None = None
    """Penalty on the logit of a token that would begin a third copy of a unit with which the generated text ends twice
    in a row. It triples with each token of that copy (lmlong.model.loop_guard). 0 turns it off; None: LOOP_PENALTY, or
    0 at temperature 0."""
    ignore_eos: bool = False
    """Never draw the end of the document, so that the text continues."""
    seed: int = 0
    """Seed of the random draws; the same seed draws the same text."""

    def __post_init__(self) -> None:
        limits = {
            "temperature": (0 <= self.temperature < float("inf"), "a number from 0 up"),
            "top_k": (self.top_k is None or self.top_k >= 1, "a whole number from 1 up"),
            "top_p": (0 < self.top_p <= 1, "a number above 0 and at most 1"),
            "min_p": (0 <= self.min_p <= 1, "a number from 0 to 1"),
            "repetition_penalty": (0 < self.repetition_penalty < float("inf"), "a number above 0"),
            "repetition_window": (1 <= self.repetition_window <= RECENT, f"a whole number from 1 to {RECENT}"),
            "loop_penalty": (0 <= self.effective_loop_penalty < float("inf"), "a number from 0 up"),
            "seed": (self.seed >= 0, "a whole number from 0 up"),
        }
        for name, (fits, expected) in limits.items():
            if not fits:
                raise UsageError(f"{name}: {getattr(self, name)} is out of range. Give {expected}.")

    @property
    def effective_loop_penalty(self) -> float:
        """`loop_penalty`, or its default at this temperature."""
        if self.loop_penalty is not None:
            return self.loop_penalty
        return LOOP_PENALTY if self.temperature > 0 else 0.0


DEFAULTS = Sampling()


def random_seed() -> int:
    """Return a random seed, short enough to type."""
    return secrets.randbits(32)
