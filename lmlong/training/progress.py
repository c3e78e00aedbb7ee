"""What a person sees while a model trains: a bar on a terminal, a line now and then elsewhere."""

import sys
import time

from tqdm import tqdm

from lmlong.model.scoring import Totals


class Progress:
    """Step, loss, bits per byte, tokens/s, learning rate and time left, on stderr."""

    def __init__(self, steps: int, first: int):
        self.steps = steps
        self.bar = tqdm(
            total=steps,
            initial=first,
            disable=None,
            dynamic_ncols=True,
            leave=False,
            bar_format="{n_fmt}/{total_fmt} |{bar}| {postfix} {remaining} left",
        )
        self._begun = time.perf_counter()
        self._seconds_per_token = 0.0
        self._shown: Totals | None = None

    def step(self, step: int, totals: Totals, tokens: int, learning_rate: float) -> float:
        """Show a step that is done; returns its tokens per second."""
        now = time.perf_counter()
        taken = (now - self._begun) / tokens
        self._begun = now
        # a running mean: single steps are too uneven to read
        self._seconds_per_token += (taken - self._seconds_per_token) * (0.1 if self._shown else 1.0)
        self._shown = totals
        text = (
            f"loss {totals.nats_per_token:.3f}, {totals.bits_per_byte:.3f} bits/byte, "
            f"{1 / self._seconds_per_token:,.0f} tokens/s, lr {learning_rate:.1e},"
        )
        if self.bar.disable:
            if step % max(self.steps // 10, 1) == 0 or step == self.steps:
                self.say(f"step {step}/{self.steps}: {text} {self._left(step, tokens)} left")
        else:
            self.bar.set_postfix_str(text, refresh=False)
            self.bar.update(1)
        return 1 / taken

    def pause(self) -> "Progress":
        """Other work begins, which is no part of a step; use with `with`."""
        return self

    def __enter__(self) -> None:
        self._paused = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._begun += time.perf_counter() - self._paused

    def say(self, line: str) -> None:
        """Print a line that stays, above the bar."""
        tqdm.write(line, file=sys.stderr)

    def close(self) -> None:
        self.bar.close()

    def _left(self, step: int, tokens: int) -> str:
        return tqdm.format_interval((self.steps - step) * tokens * self._seconds_per_token)
