"""Input and output of `lmlong generate`: prompts, texts, conversations and statistics."""

import json
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress

import click

from lmlong.cli.reading import Prompt, pieces
from lmlong.inference.chat import Conversation
from lmlong.inference.drafts import DraftCounts
from lmlong.inference.generation import Generation
from lmlong.inference.loading import TrainedLanguageModel
from lmlong.inference.session import Session
from lmlong.model.sampling_options import Sampling
from lmlong.model.state import state_bytes

BATCH = 16
"""Texts of --prompts that are continued at the same time, each by all its samples."""

SHOWN = 1000
"""Characters of the end of a prompt that a terminal shows."""


class TextOutput:
    """Writes texts to standard output, and counts tokens and seconds."""

    def __init__(
        self,
        loaded: TrainedLanguageModel,
        sampling: Sampling,
        start: Session | None = None,
        samples: int = 1,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        as_json: bool = False,
    ):
        """Prompts continue the text of `start`."""
        self.loaded, self.sampling, self.start, self.as_json = loaded, sampling, start, as_json
        self.samples, self.max_tokens, self.stop = samples, max_tokens, stop
        self.counts = DraftCounts(0, 0, 0)
        self.read_tokens = self.written_tokens = 0
        self.read_seconds = self.written_seconds = 0.0
        self.generation: Generation
        """The last one."""

    def read(self, text: str | Iterable[str]) -> Session:
        """Return the session after a prompt."""
        begun = time.perf_counter()
        session = self.loaded.read(text, self.start)
        self.read_seconds += time.perf_counter() - begun
        self.read_tokens += session.total - (self.start.total if self.start else 0)
        return session

    def stream(self, session: Session, prompt: str) -> None:
        """Print one text while it is generated; a terminal shows the prompt before it."""
        _show_prompt(prompt)
        for _, piece in self._generate([session], [(0, 0)]):
            print(piece, end="", flush=True)
        if sys.stdout.isatty():
            print(flush=True)
        row = self.generation.rows[0]
        if row.end == "eos" and not row.written:
            print("the document ended before the first token; --ignore-eos continues", file=sys.stderr)

    def write(self, prompts: Sequence[Prompt], sessions: Sequence[Session], first: int = 0) -> None:
        """Print all texts of some prompts, from the sessions after them; `first` is the number of the first prompt."""
        numbers = [(first + number, sample) for number in range(len(prompts)) for sample in range(self.samples)]
        texts = [""] * len(numbers)
        repeated = [session for session in sessions for _ in range(self.samples)]
        for index, piece in self._generate(repeated, numbers):
            texts[index] += piece
        for index, ((number, sample), text) in enumerate(zip(numbers, texts, strict=True)):
            prompt, row = prompts[number - first], self.generation.rows[index]
            if self.as_json:
                about = {**prompt.line, "sample": sample, "seed": self.sampling.seed, "text": text, "end": row.end}
                log_probabilities = [round(value, 6) for value in self.generation.log_probabilities[index]]
                line = json.dumps({**about, "tokens": row.tokens, "log_probabilities": log_probabilities})
                print(line, flush=True)
            else:
                print(f"--- prompt {number + 1}, sample {sample + 1}", file=sys.stderr, flush=True)
                _show_prompt(prompt.text)
                print(text, flush=True)

    def _generate(self, sessions: Sequence[Session], numbers: Sequence[tuple[int, int]]) -> Iterator[tuple[int, str]]:
        """Iterate over (row, piece of text), and count tokens and seconds."""
        begun = time.perf_counter()
        self.generation = self.loaded.generate(
            sessions, self.sampling, numbers, self.max_tokens, self.stop, self.as_json
        )
        yield from self.generation
        self.written_seconds += time.perf_counter() - begun
        self.written_tokens += sum(row.written for row in self.generation.rows)
        if self.generation.drafts:
            self.counts += self.generation.drafts.counts

    def statistics(self) -> str:
        """Return speed, state size, decoder and seed."""
        rows = self.generation.rows
        parts = [
            _speed("prompt", self.read_tokens, self.read_seconds),
            _speed("written", self.written_tokens, self.written_seconds),
            f"state {sum(state_bytes(row.session().state) for row in rows) // len(rows):,} bytes a text",
            f"decoded by {self.loaded.decoder}",
            str(self.counts) if self.counts.passes else "no drafts tried",
            f"seed {self.sampling.seed}",
        ]
        return "; ".join(parts)


def talk(conversation: Conversation, prompt: str | None, sampling: Sampling, max_tokens: int | None) -> None:
    """Answer the given message, or standard input, of which each line of a terminal is a message."""
    messages: Iterable[str] = [prompt] if prompt is not None else _lines()
    if prompt is None and not sys.stdin.isatty():
        messages = ["".join(pieces(None))]
    for message in messages:
        for piece in conversation.say(message, sampling, max_tokens):
            print(piece, end="", flush=True)
        print()


def _lines() -> Iterator[str]:
    """Iterate over the lines of a terminal, with line editing."""
    with suppress(ImportError):  # Windows has none
        import readline  # noqa: F401  input() uses it once it is imported
    while True:
        try:
            line = input("> ")
        except EOFError:
            print()
            return
        if line.strip():
            yield line


def _show_prompt(prompt: str) -> None:
    """Print the end of a prompt, dimmed, if standard output is a terminal."""
    if prompt and sys.stdout.isatty():
        click.secho(prompt if len(prompt) <= SHOWN else "…" + prompt[-SHOWN:], dim=True, nl=False)


def _speed(what: str, tokens: int, seconds: float) -> str:
    unit = "token" if tokens == 1 else "tokens"
    return f"{what} {tokens:,} {unit} in {seconds:.2f} s ({tokens / max(seconds, 1e-9):,.0f} tokens/s)"
