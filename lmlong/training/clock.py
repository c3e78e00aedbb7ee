"""The time that a run has trained so far, and the step that it is expected to end at."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

from lightning.pytorch import Trainer

from lmlong import recipe
from lmlong.training.distributed import all_reduce_max

MICROSECONDS = 1_000_000


class TrainingClock:
    """The seconds spent in training steps, waits for their batches among them; set-up, validation, samples and
    checkpoints do not count. With `training.minutes` the clock of the first rank decides for all.

    A checkpoint keeps the seconds, so a run that was killed has the time left that it had when it was saved.
    """

    def __init__(self, options: recipe.Training, steps: int, seconds: float = 0.0):
        self.steps = steps  # by training.steps and training.tokens
        self.budget = None if options.minutes is None else 60 * options.minutes
        self.seconds = seconds
        self._since = time.perf_counter()

    def start(self) -> None:
        """Begin the first step."""
        self._since = time.perf_counter()

    def step(self, trainer: Trainer) -> float:
        """Count the step that ends now, and return the seconds it took; all ranks call this together."""
        now = time.perf_counter()
        taken, self._since = now - self._since, now
        self.seconds += taken
        if self.budget is not None:
            own = round(self.seconds * MICROSECONDS) if trainer.is_global_zero else 0
            self.seconds = all_reduce_max(trainer, own) / MICROSECONDS
        return taken

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Leave other work out of the time of a step."""
        paused = time.perf_counter()
        yield
        self._since += time.perf_counter() - paused

    @property
    def is_over(self) -> bool:
        """Whether the minutes are used up."""
        return self.budget is not None and self.seconds >= self.budget

    def ends_at(self, step: int) -> bool:
        """Return whether a run ends after this step."""
        return step >= self.steps or self.is_over

    def remaining_steps(self, step: int) -> int:
        """Return the number of steps after `step` that a run may take."""
        return 0 if self.is_over else max(self.steps - step, 0)

    def expected_steps(self, step: int) -> int:
        """Return the number of steps of the whole run, estimated from the mean time of its first `step` steps."""
        share = self.seconds / self.budget if self.budget else 0.0
        if not share:
            return self.steps
        return max(min(self.steps, math.ceil((step + 1) / share)), step + 1)
