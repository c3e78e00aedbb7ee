"""The progress of training: a bar on a terminal, a line now and then elsewhere."""

import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from tqdm import tqdm

from lmlong.model.metrics import LossTotals, Metric

RECENT = 20
"""Steps that the shown numbers are averaged over: single steps are too uneven to read."""


class Progress:
    """Step, loss and the metric of the objective, tokens/s, learning rate and time left, on stderr."""

    def __init__(self, steps: int, first: int, silent: bool, metric: Metric, tokens_per_target: float):
        self.steps, self.silent, self.metric, self.tokens_per_target = steps, silent, metric, tokens_per_target
        self.bar = tqdm(
            total=steps,
            initial=first,
            disable=True if silent else None,
            dynamic_ncols=True,
            leave=False,
            bar_format="{n_fmt}/{total_fmt} |{bar}| {desc} {remaining} left",
        )
        self._begun = time.perf_counter()
        self._recent: deque[tuple[LossTotals, float]] = deque(maxlen=RECENT)  # losses and seconds of steps

    def step(self, step: int, totals: LossTotals, learning_rate: float) -> float:
        """Show a finished step, and return its tokens per second."""
        now = time.perf_counter()
        taken, self._begun = now - self._begun, now
        self._recent.append((totals, taken))
        lost = sum((part for part, _ in self._recent), LossTotals())
        seconds = sum(part for _, part in self._recent)
        speed = lost.tokens * self.tokens_per_target / seconds
        text = (
            f"loss {lost.nats_per_token:.3f}, {self.metric.of(lost):.3f} {self.metric.unit}, "
            f"{speed:,.0f} tokens/s, lr {learning_rate:.1e},"
        )
        if not self.bar.disable:
            # shorter here, so that it fits into 80 columns
            self.bar.set_description_str(text.replace("tokens/s", "tok/s"), refresh=False)
            with suppress(OSError):  # a closed pipe must not end a run
                self.bar.update(1)
        elif step % max(self.steps // 10, 1) == 0 or step == self.steps:
            left = tqdm.format_interval((self.steps - step) * seconds / len(self._recent))
            self.say(f"step {step}/{self.steps}: {text} {left} left")
        return totals.tokens * self.tokens_per_target / taken

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Exclude other work from the time of a step."""
        paused = time.perf_counter()
        yield
        self._begun += time.perf_counter() - paused

    def say(self, line: str) -> None:
        """Print a permanent line above the bar."""
        if not self.silent:
            with suppress(OSError):
                tqdm.write(line, file=sys.stderr)

    def close(self) -> None:
        with suppress(OSError):
            self.bar.close()
