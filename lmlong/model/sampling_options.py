"""The options of sampling and their defaults: the one table that Python, the commands, the server, its page and the
exports read. It imports no torch, so that commands can show it at once."""

import secrets
from dataclasses import dataclass

from lmlong.errors import UsageError

MAX_TOKENS = 200
"""Tokens written where no number is given."""

RECENT = 1024
"""Number of the last tokens that penalties on repetition look at, at most."""

DRY_MULTIPLIER = 2.0
"""The multiplier of DRY at temperatures above 0, where none is given."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """The options of sampling. The repetition penalty acts first, then DRY, the temperature, top-k, top-p and min-p,
    each on what the one before it left."""

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
    dry_multiplier: float | None = None
    """Strength of DRY ("don't repeat yourself"), which lowers the logit of a token that followed the same n tokens
    earlier in the generated text by dry_multiplier * dry_base ** (n - dry_allowed_length). 0 turns it off; None:
    DRY_MULTIPLIER, or 0 at temperature 0."""
    dry_base: float = 3.0
    """Factor by which the penalty of DRY grows with each repeated token."""
    dry_allowed_length: int = 4
    """DRY leaves a token alone that followed fewer than this many same tokens."""
    seed: int = 0
    """Seed of the random draws: the same seed draws the same text."""

    def __post_init__(self) -> None:
        multiplier = self.effective_dry_multiplier
        limits = {
            "temperature": (0 <= self.temperature < float("inf"), "a number from 0 up"),
            "top_k": (self.top_k is None or self.top_k >= 1, "a whole number from 1 up"),
            "top_p": (0 < self.top_p <= 1, "a number above 0 and at most 1"),
            "min_p": (0 <= self.min_p <= 1, "a number from 0 to 1"),
            "repetition_penalty": (0 < self.repetition_penalty < float("inf"), "a number above 0"),
            "repetition_window": (1 <= self.repetition_window <= RECENT, f"a whole number from 1 to {RECENT}"),
            "dry_multiplier": (0 <= multiplier < float("inf"), "a number from 0 up"),
            "dry_base": (1 <= self.dry_base <= 100, "a number from 1 to 100"),
            "dry_allowed_length": (1 <= self.dry_allowed_length <= RECENT, f"a whole number from 1 to {RECENT}"),
            "seed": (self.seed >= 0, "a whole number from 0 up"),
        }
        for name, (fits, expected) in limits.items():
            if not fits:
                raise UsageError(f"{name}: {getattr(self, name)} is out of range. Give {expected}.")

    @property
    def effective_dry_multiplier(self) -> float:
        """`dry_multiplier`, or its default at this temperature."""
        if self.dry_multiplier is not None:
            return self.dry_multiplier
        return DRY_MULTIPLIER if self.temperature > 0 else 0.0


DEFAULTS = Sampling()


def random_seed() -> int:
    """Return a seed that no other text has, short enough to be typed again."""
    return secrets.randbits(32)
