"""Input and output of `lmlong generate`: prompts, texts and statistics."""

import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lmlong.cli.reading import pieces
from lmlong.errors import UsageError
from lmlong.inference.generation import Generation
from lmlong.inference.loading import TrainedLanguageModel
from lmlong.inference.prompts import Prompt, many
from lmlong.inference.sampling import Sampling
from lmlong.inference.session import Session, repeat_rows
from lmlong.model.state import concat_states, state_bytes

Row = tuple[int, Prompt]
"""The index of a prompt among all, and the prompt."""

ONLY: Row = (0, Prompt("", {}))


class Show:
    """The output of a command: texts to standard output, everything else to standard error."""

    def __init__(self, as_json: bool, stats: bool, keep: bool, one: bool):
        self.as_json, self.stats, self.keep, self.one = as_json, stats, keep, one
        self.read_tokens = self.written_tokens = self.state_bytes = 0
        self.read_seconds = self.written_seconds = 0.0

    def write(
        self,
        loaded: TrainedLanguageModel,
        session: Session,
        sampling: Sampling,
        rows: Sequence[Row],
        samples: int,
        max_tokens: int | None,
        stop: Sequence[str],
    ) -> Generation:
        """Generate `samples` continuations of each row and show them; return what generated them."""
        numbers = [(number, sample) for number, _ in rows for sample in range(samples)]
        begun = time.perf_counter()
        writing = loaded.generate(repeat_rows(session, samples), sampling, numbers, max_tokens, stop, self.keep)
        texts = self._pieces(writing)
        self.written_seconds += time.perf_counter() - begun
        self.written_tokens += sum(row.written for row in writing.rows)
        self.state_bytes = state_bytes(writing.session.state) // len(numbers)
        for place, text in enumerate(texts):
            if not self.one or self.as_json:
                prompt = rows[place // samples][1]
                self._show(text, writing, place, prompt, *numbers[place])
        return writing

    def _pieces(self, writing: Generation) -> list[str]:
        """Return the whole texts; a single one is streamed, and not kept."""
        texts = [""] * len(writing.rows)
        for row, piece in writing:
            if self.one and not self.as_json:
                _say(piece)
            else:
                texts[row] += piece
        if self.one and not self.as_json and sys.stdout.isatty():
            _say("\n")
        return texts

    def _show(self, text: str, writing: Generation, place: int, prompt: Prompt, number: int, sample: int) -> None:
        row = writing.rows[place]
        if self.as_json:
            about = {**prompt.line, "sample": sample, "text": text, "end": row.end}
            log_probabilities = [round(value, 6) for value in row.log_probabilities]
            _say(json.dumps({**about, "tokens": row.tokens, "log_probabilities": log_probabilities}) + "\n")
        else:
            print(f"--- prompt {number + 1}, sample {sample + 1}", file=sys.stderr, flush=True)
            _say(text + "\n")

    def finish(self, decoder: str) -> None:
        """Show the statistics, where they were asked for; `decoder` says what computed the tokens."""
        if self.stats:
            parts = [
                _speed("prompt", self.read_tokens, self.read_seconds),
                _speed("written", self.written_tokens, self.written_seconds),
                f"state {self.state_bytes:,} bytes a text",
                f"decoded by {decoder}",
            ]
            print("; ".join(parts), file=sys.stderr)


def read_one(
    loaded: TrainedLanguageModel, prompt: str | None, file: Path | None, start: Session | None, heal: bool, show: Show
) -> Session:
    """Prefill the one prompt of a command, from its option, a file or standard input."""
    begun = time.perf_counter()
    before = int(start.total) if start else 0
    if prompt is not None or (file is None and (sys.stdin is None or sys.stdin.isatty())):
        session = loaded.read(prompt or "", start, heal=heal)
    else:
        session = loaded.read(pieces(file), start, heal=heal)
    show.read_seconds += time.perf_counter() - begun
    show.read_tokens += int(session.total) - before
    return session


def read_many(
    loaded: TrainedLanguageModel, path: Path, batch: int, start: Session | None, heal: bool, show: Show
) -> Iterator[tuple[list[Row], Session]]:
    """Iterate over the prompts of a file in batches, each prefilled by itself and then concatenated."""
    prompts = list(enumerate(many(path)))
    if not prompts:
        raise UsageError(f"{path}: holds no prompt.")
    for begin in range(0, len(prompts), batch):
        begun = time.perf_counter()
        rows = prompts[begin : begin + batch]
        sessions = [loaded.read(prompt.text, start, heal=heal) for _, prompt in rows]
        show.read_seconds += time.perf_counter() - begun
        show.read_tokens += sum(int(session.total) - (int(start.total) if start else 0) for session in sessions)
        yield rows, concat_states(sessions)


def _speed(what: str, tokens: int, seconds: float) -> str:
    return f"{what} {tokens:,} tokens in {seconds:.2f} s ({tokens / max(seconds, 1e-9):,.0f} tokens/s)"


def _say(text: Any) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
