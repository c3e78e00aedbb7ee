"""Input and output of `lmlong generate`: prompts, texts and statistics."""

import json
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import click

from lmlong.cli.reading import pieces
from lmlong.errors import UsageError
from lmlong.inference.drafts import DraftCounts
from lmlong.inference.generation import Generation
from lmlong.inference.loading import TrainedLanguageModel
from lmlong.inference.prompts import Prompt, many
from lmlong.inference.session import Session
from lmlong.model.sampling_options import Sampling
from lmlong.model.state import state_bytes

Row = tuple[int, Prompt]
"""The index of a prompt among all, and the prompt."""

BATCH = 16
"""Texts of --prompts that are continued at the same time, each by all its samples."""

SHOWN = 1000
"""Characters of the end of a prompt that a terminal shows."""


class TextOutput:
    """The output of the command: texts to standard output, everything else to standard error."""

    def __init__(self, as_json: bool, stats: bool, one_text: bool):
        self.as_json, self.stats, self.one_text = as_json, stats, one_text
        self.counts = DraftCounts(0, 0, 0)
        self.read_tokens = self.written_tokens = self.state_bytes = 0
        self.read_seconds = self.written_seconds = 0.0

    def write(
        self,
        loaded: TrainedLanguageModel,
        sessions: Sequence[Session],
        sampling: Sampling,
        rows: Sequence[Row],
        samples: int,
        max_tokens: int | None,
        stop: Sequence[str],
    ) -> Generation:
        """Generate `samples` continuations of each row, print them, and return the generation."""
        numbers = [(number, sample) for number, _ in rows for sample in range(samples)]
        repeated = [session for session in sessions for _ in range(samples)]
        begun = time.perf_counter()
        writing = loaded.generate(repeated, sampling, numbers, max_tokens, stop, self.as_json)
        texts = self._pieces(writing, rows[0][1])
        self.written_seconds += time.perf_counter() - begun
        self.written_tokens += sum(row.written for row in writing.rows)
        if writing.drafts:
            self.counts += writing.drafts.counts
        self.state_bytes = sum(state_bytes(row.session().state) for row in writing.rows) // len(numbers)
        for index, text in enumerate(texts):
            if not self.one_text or self.as_json:
                prompt = rows[index // samples][1]
                self._print_text(text, writing, index, prompt, sampling.seed, *numbers[index])
        return writing

    def _pieces(self, writing: Generation, prompt: Prompt) -> list[str]:
        """Return the texts; a single text is streamed instead, and an empty string returned."""
        texts = [""] * len(writing.rows)
        streams = self.one_text and not self.as_json
        if streams:
            _show_prompt(prompt)
        for row, piece in writing:
            if streams:
                _print(piece)
            else:
                texts[row] += piece
        if streams and sys.stdout.isatty():
            _print("\n")
        if streams and writing.rows[0].end == "eos" and not writing.rows[0].written:
            print("the document ended before the first token; --ignore-eos continues", file=sys.stderr)
        return texts

    def _print_text(
        self, text: str, writing: Generation, index: int, prompt: Prompt, seed: int, number: int, sample: int
    ) -> None:
        row = writing.rows[index]
        if self.as_json:
            about = {**prompt.line, "sample": sample, "seed": seed, "text": text, "end": row.end}
            log_probabilities = [round(value, 6) for value in writing.log_probabilities[index]]
            _print(json.dumps({**about, "tokens": row.tokens, "log_probabilities": log_probabilities}) + "\n")
        else:
            print(f"--- prompt {number + 1}, sample {sample + 1}", file=sys.stderr, flush=True)
            _show_prompt(prompt)
            _print(text + "\n")

    def finish(self, decoder: str, seed: int) -> None:
        """Print the statistics with --stats: speed, state size, decoder and seed."""
        if self.stats:
            parts = [
                _speed("prompt", self.read_tokens, self.read_seconds),
                _speed("written", self.written_tokens, self.written_seconds),
                f"state {self.state_bytes:,} bytes a text",
                f"decoded by {decoder}",
                str(self.counts) if self.counts.passes else "no drafts tried",
                f"seed {seed}",
            ]
            print("; ".join(parts), file=sys.stderr)


def read_one(
    loaded: TrainedLanguageModel, prompt: str | None, start: Session | None, output: TextOutput
) -> tuple[Row, Session]:
    """Prefill one prompt from its option or standard input; return its end and the session."""
    begun = time.perf_counter()
    before = start.total if start else 0
    typed = prompt is not None or sys.stdin is None or sys.stdin.isatty()
    text: Iterable[str] = [prompt or ""] if typed else pieces(None)
    end = PromptEnd()
    session = loaded.read(end.while_read(text), start)
    output.read_seconds += time.perf_counter() - begun
    output.read_tokens += session.total - before
    return (0, Prompt(end.text, {})), session


def read_many(
    loaded: TrainedLanguageModel, path: Path, start: Session | None, output: TextOutput
) -> Iterator[tuple[list[Row], list[Session]]]:
    """Iterate over the prompts of a file in batches, each prefilled by itself."""
    prompts = list(enumerate(many(path)))
    if not prompts:
        raise UsageError(f"{path}: contains no prompt.")
    for begin in range(0, len(prompts), BATCH):
        begun = time.perf_counter()
        rows = prompts[begin : begin + BATCH]
        sessions = [loaded.read(prompt.text, start) for _, prompt in rows]
        output.read_seconds += time.perf_counter() - begun
        output.read_tokens += sum(session.total - (start.total if start else 0) for session in sessions)
        yield rows, sessions


class PromptEnd:
    """The last characters of a streamed text."""

    def __init__(self) -> None:
        self.text = ""

    def while_read(self, text: Iterable[str]) -> Iterator[str]:
        for piece in text:
            self.text = (self.text + piece)[-SHOWN - 1 :]
            yield piece


def _show_prompt(prompt: Prompt) -> None:
    """Print the end of a prompt, dimmed, if standard output is a terminal."""
    if prompt.text and sys.stdout.isatty():
        text = prompt.text if len(prompt.text) <= SHOWN else "…" + prompt.text[-SHOWN:]
        click.secho(text, dim=True, nl=False)


def _speed(what: str, tokens: int, seconds: float) -> str:
    unit = "token" if tokens == 1 else "tokens"
    return f"{what} {tokens:,} {unit} in {seconds:.2f} s ({tokens / max(seconds, 1e-9):,.0f} tokens/s)"


def _print(text: str) -> None:
    print(text, end="", flush=True)
