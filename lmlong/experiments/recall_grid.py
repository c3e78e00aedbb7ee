"""The settings of the recall experiment; imports no torch, so that --help is fast."""

from typing import NamedTuple

from lmlong.errors import UsageError

DEFAULT_CANDIDATES = ("softmax", "window", "elu", "elu-learned", "favor")
"""The candidates trained by default."""

TOKENS_PER_PAIR = 4
"""The smallest number, for a key, its value, the query and the filler after it."""


class RecallGrid(NamedTuple):
    """Which models are trained, on what, and for how long."""

    vocabulary: int
    pairs: tuple[int, ...]  # each model is trained on all of them, and measured on each
    tokens_per_pair: int
    widths: tuple[int, ...]
    rates: tuple[float, ...]
    steps: int
    queries: int  # in a training step, for each number of pairs

    def check(self) -> None:
        """Raise a UsageError for settings that cannot be built."""
        for option, numbers in (("--pairs", self.pairs), ("--widths", self.widths), ("--rates", self.rates)):
            for number in numbers:
                if not 0 < number < float("inf"):
                    raise UsageError(f"{option}: {number:g} cannot be used. Give numbers above 0.")
        most, keys = max(self.pairs), self.vocabulary // 2 - 1
        if most > keys:
            raise UsageError(
                f"--vocabulary: of {self.vocabulary} tokens {max(keys, 0)} can be keys, too few for {most} pairs. "
                f"Give {2 * most + 2} or more, or fewer --pairs."
            )


SMALL = RecallGrid(64, (4, 8, 16), TOKENS_PER_PAIR, (16, 32, 64), (8e-3, 4e-3), steps=400, queries=128)
"""Minutes on two CPU cores."""

LARGE = RecallGrid(
    8192, (4, 8, 16, 32, 64), TOKENS_PER_PAIR, (64, 128, 256), (4e-3, 2e-3, 1e-3), steps=20_000, queries=2048
)
"""As large as in the paper; for a GPU."""
