"""The steps of a run: their figures, their time, when the run is validated, saved and over, and its progress on stderr.

Figures stay on the device until those of several steps are fetched at once, since a GPU would stand idle after each
fetch.
"""

import math
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple

import torch
from lightning.pytorch import Trainer
from torch import Tensor
from tqdm import tqdm

from lmlong import recipe
from lmlong.model.metrics import LossTotals, Metric
from lmlong.training.distributed import all_reduce_max

MICROSECONDS = 1_000_000

AVERAGED = 20
"""Number of steps over which shown numbers are averaged: single steps vary too much to read."""

VALIDATIONS = 5
"""Minimum number of validations of a run."""

STEPS, MINUTES = 500, 10
"""Maximum number of steps between validations, or of minutes if only time ends the run; and of minutes between
checkpoints."""

TICK = 1e-9
"""The least seconds of a step: a process that only waited has used no processor time."""

CLOCKS: dict[str, Callable[[], float]] = {
    "wall": time.perf_counter,
    "process": lambda: time.process_time() / torch.get_num_threads(),
}
"""The seconds that each `training.clock` shows."""


class BatchFigures(NamedTuple):
    """The loss of a batch."""

    number: int  # of the batch
    counts: LossTotals  # of its targets, without their loss
    loss: Tensor  # to minimize
    nll: Tensor  # to report


class StepFigures(NamedTuple):
    """The figures of an optimizer step."""

    step: int
    learning_rate: float
    batches: list[BatchFigures]
    gradient_norm: Tensor
    skipped: Tensor  # consecutive steps skipped so far

    def tensors(self) -> Iterator[Tensor]:
        for batch in self.batches:
            yield batch.loss
            yield batch.nll
        yield self.gradient_norm
        yield self.skipped


class FetchedFigures(NamedTuple):
    """The figures of an optimizer step as numbers."""

    step: int
    learning_rate: float
    losses: dict[int, float]  # to minimize, by the number of the batch
    totals: LossTotals
    gradient_norm: float
    skipped: int


def fetch(steps: Sequence[StepFigures]) -> list[FetchedFigures]:
    """Return the figures of steps as numbers. This waits for the device, once."""
    values = iter(torch.stack([tensor for figures in steps for tensor in figures.tensors()]).tolist())
    return [_from_values(figures, values) for figures in steps]


def _from_values(figures: StepFigures, values: Iterator[float]) -> FetchedFigures:
    """Return the figures of a step, given the values of its tensors."""
    losses, totals = {}, LossTotals()
    for batch in figures.batches:
        losses[batch.number] = next(values)
        totals += batch.counts + LossTotals(next(values))
    norm, skipped = next(values), next(values)
    return FetchedFigures(figures.step, figures.learning_rate, losses, totals, norm, int(skipped))


class TrainingClock:
    """The seconds spent in training steps by `training.clock`; set-up, validation, samples and checkpoints do not
    count. The clock of the first rank decides for all, each time that they agree on it.

    A checkpoint stores the seconds, so a resumed run has the time left that it had when it was saved.
    """

    def __init__(self, options: recipe.Training, steps: int, seconds: float = 0.0):
        self.steps = steps  # by training.steps and training.tokens
        self.note = options.clock_note
        self.budget = None if options.minutes is None else 60 * options.minutes
        self.seconds = seconds
        self._since_agreed = 0.0  # seconds
        self._steps_since_agreed = 0
        self._now = CLOCKS[options.clock]
        self._since = self._now()

    def start(self) -> None:
        """Begin the first step."""
        self._since = self._now()

    def step(self, trainer: Trainer, agrees: bool = True) -> float:
        """Count the step that ends now, and return its seconds. If it `agrees`, all ranks call this together."""
        now = self._now()
        taken, self._since = max(now - self._since, TICK), now
        self._since_agreed += taken
        self._steps_since_agreed += 1
        if agrees or trainer.world_size == 1:
            self.seconds += self._since_agreed
            self._since_agreed, self._steps_since_agreed = 0.0, 0
            own = round(self.seconds * MICROSECONDS) if trainer.is_global_zero else 0
            self.seconds = all_reduce_max(trainer, own) / MICROSECONDS
        return taken

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Exclude other work from the time of a step."""
        paused = self._now()
        yield
        self._since += self._now() - paused

    @property
    def is_over(self) -> bool:
        """Whether the minutes are used up."""
        return self.budget is not None and self.seconds >= self.budget

    def ends_at(self, step: int) -> bool:
        """Return whether the run ends after this step."""
        return step >= self.steps or self.is_over

    def parts_done(self, step: int, parts: int) -> int:
        """Return how many of `parts` equal parts of the run have ended, by its steps or its time."""
        return max(parts * step // self.steps, int(parts * self.seconds / self.budget) if self.budget else 0)

    def remaining_steps(self, step: int) -> int:
        """Return the number of steps after `step` that a run may take."""
        return 0 if self.is_over else max(self.steps - step, 0)

    def expected_steps(self, step: int) -> int:
        """Return the number of steps of the whole run, estimated from the mean time of its first `step` steps."""
        share = self.seconds / self.budget if self.budget else 0.0
        if not share:
            return self.steps
        counted = step - self._steps_since_agreed
        return max(min(self.steps, math.ceil((counted + 1) / share)), step + 1)


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


class Progress:
    """Progress on stderr: step, loss, the objective's metric if the loss is of the text, tokens/s, learning rate and
    time left."""

    def __init__(self, clock: TrainingClock, first: int, silent: bool, metric: Metric | None, tokens_per_target: float):
        self.clock, self.silent, self.metric, self.tokens_per_target = clock, silent, metric, tokens_per_target
        steps = clock.expected_steps(first)
        self._tenth = 10 * first // steps  # of the run, at which the last line was printed
        self.bar = tqdm(
            total=steps,
            initial=first,
            disable=True if silent else None,
            dynamic_ncols=True,
            leave=False,
            bar_format="{n_fmt}/{total_fmt} |{bar}| {desc} {remaining} left",
        )
        self._recent: deque[tuple[LossTotals, float]] = deque(maxlen=AVERAGED)  # losses and seconds of steps

    def step(self, step: int, totals: LossTotals, learning_rate: float, taken: float, last: bool) -> float:
        """Show a finished step, which took `taken` seconds, and return its tokens per second; `last` ends the run."""
        self._recent.append((totals, taken))
        seconds = sum(part for _, part in self._recent)
        speed = sum(part.tokens for part, _ in self._recent) * self.tokens_per_target / seconds
        lost = sum((part for part, _ in self._recent if math.isfinite(part.nats)), LossTotals())
        metric = f"{self.metric.of(lost):.3f} {self.metric.unit}, " if self.metric else ""
        text = f"loss {lost.nats_per_token:.3f}, {metric}{speed:,.0f} tokens/s, lr {learning_rate:.1e},"
        steps = self.clock.expected_steps(step)
        tenth = 10 * step // steps
        if not self.bar.disable:
            self.bar.total = steps
            # shorter here, so that it fits into 80 columns
            self.bar.set_description_str(text.replace("tokens/s", "tok/s"), refresh=False)
            with suppress(OSError):  # a closed pipe must not end a run
                self.bar.update(1)
        elif tenth > self._tenth or last:
            self._tenth = tenth
            left = 0 if last else (steps - step) * seconds / len(self._recent)
            self.say(f"{self.name(step)}: {text} {tqdm.format_interval(left)}{self.clock.note} left")
        return totals.tokens * self.tokens_per_target / taken

    def name(self, step: int) -> str:
        """Return the label of a step: out of all steps, or with the share of the time used if time ends the run."""
        if self.clock.budget is None:
            return f"step {step}/{self.clock.steps}"
        used = min(self.clock.seconds / self.clock.budget, 1)
        return f"step {step}, {used:.0%}{self.clock.note or ' of the time'}"

    def say(self, line: str) -> None:
        """Print a permanent line above the bar."""
        if not self.silent:
            with suppress(OSError):
                tqdm.write(line, file=sys.stderr)

    def close(self) -> None:
        with suppress(OSError):
            self.bar.close()
