"""The progress of training: a bar on a terminal, a line now and then elsewhere."""

import sys
from collections import deque
from contextlib import suppress

from tqdm import tqdm

from lmlong.model.metrics import LossTotals, Metric
from lmlong.training.clock import TrainingClock

RECENT = 20
"""Steps that the shown numbers are averaged over: single steps are too uneven to read."""


class Progress:
    """Step, loss, the metric of the objective where the loss has it, tokens/s, learning rate and time left, on
    stderr."""

    def __init__(self, clock: TrainingClock, first: int, silent: bool, metric: Metric | None, tokens_per_target: float):
        self.clock, self.silent, self.metric, self.tokens_per_target = clock, silent, metric, tokens_per_target
        steps = clock.expected_steps(first)
        self._tenth = 10 * first // steps  # of the run, after which a line was printed
        self.bar = tqdm(
            total=steps,
            initial=first,
            disable=True if silent else None,
            dynamic_ncols=True,
            leave=False,
            bar_format="{n_fmt}/{total_fmt} |{bar}| {desc} {remaining} left",
        )
        self._recent: deque[tuple[LossTotals, float]] = deque(maxlen=RECENT)  # losses and seconds of steps

    def step(self, step: int, totals: LossTotals, learning_rate: float, taken: float) -> float:
        """Show a finished step, which took so many seconds, and return its tokens per second."""
        self._recent.append((totals, taken))
        lost = sum((part for part, _ in self._recent), LossTotals())
        seconds = sum(part for _, part in self._recent)
        speed = lost.tokens * self.tokens_per_target / seconds
        text = f"loss {lost.nats_per_token:.3f}, {self._metric_of(lost)}{speed:,.0f} tokens/s, lr {learning_rate:.1e},"
        steps = self.clock.expected_steps(step)
        tenth = 10 * step // steps
        if not self.bar.disable:
            self.bar.total = steps
            # shorter here, so that it fits into 80 columns
            self.bar.set_description_str(text.replace("tokens/s", "tok/s"), refresh=False)
            with suppress(OSError):  # a closed pipe must not end a run
                self.bar.update(1)
        elif tenth > self._tenth or self.clock.ends_at(step):
            self._tenth = tenth
            left = 0 if self.clock.ends_at(step) else (steps - step) * seconds / len(self._recent)
            self.say(f"{self.name(step)}: {text} {tqdm.format_interval(left)} left")
        return totals.tokens * self.tokens_per_target / taken

    def _metric_of(self, totals: LossTotals) -> str:
        return f"{self.metric.of(totals):.3f} {self.metric.unit}, " if self.metric else ""

    def name(self, step: int) -> str:
        """Return the name of a step in what is printed, with the last one, which is a guess where time decides."""
        if self.clock.budget is None:
            return f"step {step}/{self.clock.steps}"
        return f"step {step}, {min(self.clock.seconds / self.clock.budget, 1):.0%} of the time"

    def say(self, line: str) -> None:
        """Print a permanent line above the bar."""
        if not self.silent:
            with suppress(OSError):
                tqdm.write(line, file=sys.stderr)

    def close(self) -> None:
        with suppress(OSError):
            self.bar.close()
