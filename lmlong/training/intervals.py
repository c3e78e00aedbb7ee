"""When a run is validated and saved."""

import math

from lmlong import recipe
from lmlong.training.progress import TrainingClock

VALIDATIONS = 5
"""Minimum number of validations of a run."""

STEPS, MINUTES = 500, 10
"""Maximum number of steps between validations, or of minutes if only time ends the run; and of minutes between
checkpoints."""


class Intervals:
    """The steps after which a run is validated and saved, by `validate_every` and `checkpoint_every`, or by its length.
    All ranks compute the same, since their clocks agree."""

    def __init__(self, options: recipe.Training, clock: TrainingClock, step: int = 0):
        self.options, self.clock = options, clock
        lengths = [clock.steps / STEPS, *([options.minutes / MINUTES] if options.minutes else [])]
        self.parts = max(min(VALIDATIONS, clock.steps), math.ceil(min(lengths)))
        self._done, self._saved_at = clock.parts_done(step, self.parts), clock.seconds

    def validates(self, step: int) -> bool:
        """Return whether the run is validated after this step; to be called after each one."""
        if self.options.validate_every:
            return step % self.options.validate_every == 0
        before, self._done = self._done, self.clock.parts_done(step, self.parts)
        return self._done > before

    def saves(self, step: int) -> bool:
        """Return whether a checkpoint is written after this step, even without a validation."""
        if self.options.checkpoint_every:
            return step % self.options.checkpoint_every == 0
        return self.clock.seconds - self._saved_at >= 60 * MINUTES

    def saved(self) -> None:
        """Note that a checkpoint is written now."""
        self._saved_at = self.clock.seconds

    def __str__(self) -> str:
        validates, saves = self.options.validate_every, self.options.checkpoint_every
        return (
            f"validation {f'every {validates:,} steps' if validates else f'{self.parts:,} times'}, "
            f"a checkpoint then and every {f'{saves:,} steps' if saves else f'{MINUTES} minutes'}"
        )
