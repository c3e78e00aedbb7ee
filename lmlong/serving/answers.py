"""Response bodies in OpenAI's formats, whole and as chunks of a stream."""

import re
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from lmlong.data.tokenizers.base import Tokenizer
from lmlong.serving.bodies import WritingBody
from lmlong.serving.inbox import Batch
from lmlong.serving.request import Progress, TokenLikelihood, WrittenToken
from lmlong.serving.session_file import SessionInfo
from lmlong.serving.session_text import Passage

REASONS = {"eos": "stop", "stop": "stop", "max_tokens": "length"}

SURROGATES = re.compile("[\ud800-\udfff]")


def printable(text: str) -> str:
    """Replace surrogates, which a model may generate but JSON cannot contain."""
    return SURROGATES.sub("\ufffd", text)


def finite(log_probability: float) -> float:
    """Return a log-probability as OpenAI reports it: JSON has no -inf."""
    return max(log_probability, -9999.0)


@dataclass
class Piece:
    """The generated part of one text."""

    text: str = ""
    tokens: list[WrittenToken] = field(default_factory=list)
    reason: str | None = None
    progress: Progress | None = None


@dataclass
class Usage:
    """Token counts of a request; a prompt counts once, whatever the number of its texts."""

    texts_of_a_prompt: int
    read: int = 0
    cached: int = 0
    written: int = 0

    def add(self, batch: Batch) -> None:
        for number, event in batch:
            self.written += event.written_tokens
            if number % self.texts_of_a_prompt == 0:
                self.read += event.prompt_tokens
                self.cached += event.cached_tokens

    def body(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.read,
            "completion_tokens": self.written,
            "total_tokens": self.read + self.written,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }


def pieces(batch: Batch) -> dict[int, Piece]:
    """Return the piece that a batch of events adds to each text."""
    by_text: dict[int, Piece] = {}
    for number, event in batch:
        piece = by_text.setdefault(number, Piece())
        piece.text += event.text
        piece.progress = event.progress or piece.progress
        if event.token is not None:
            piece.tokens.append(event.token)
        if event.end is not None:
            piece.reason = REASONS[event.end]
    return by_text


def text_body(name: str, passages: Sequence[Passage], tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the text that a session adds to its parent's as JSON."""
    parts = []
    for by, data, tokens in passages:
        log_probabilities = completion_log_probabilities(tokenizer, tokens) if tokens else None
        parts.append({"by": by, "text": data.decode(errors="replace"), "logprobs": log_probabilities})
    return {"id": name, "object": "session.text", "passages": parts}


class ResponseFormat(ABC):
    """The bodies of the responses to one request, whole and as events of a stream."""

    @abstractmethod
    def whole(self, batch: Batch, session: SessionInfo | None) -> dict[str, Any]:
        """Return the body of a whole response, from all that the scheduler delivered, and the session after it."""

    def first(self, branch: str | None) -> list[dict[str, Any]]:
        """Return the events before any text; `branch` is the id of the session that the request forks, if any."""
        return []

    @abstractmethod
    def events(self, batch: Batch) -> list[dict[str, Any]]:
        """Return the events of what the scheduler delivered."""

    @abstractmethod
    def last(self, session: SessionInfo | None) -> list[dict[str, Any]]:
        """Return the events after all text, once the session is saved."""


class SessionFormat(ResponseFormat):
    """How much of a text has been read into a session, then the session."""

    def whole(self, batch: Batch, session: SessionInfo | None) -> dict[str, Any]:
        assert session is not None
        return session._asdict()

    def events(self, batch: Batch) -> list[dict[str, Any]]:
        return [event.progress._asdict() for _, event in batch[-1:] if event.progress]

    def last(self, session: SessionInfo | None) -> list[dict[str, Any]]:
        return [self.whole([], session)]


class TextFormat(ResponseFormat):
    """The texts of one of OpenAI's endpoints."""

    kind: str
    chunk_kind: str
    prefix: str

    def __init__(self, tokenizer: Tokenizer, body: WritingBody, texts: int, model: str, fingerprint: str):
        self._tokenizer, self._alternatives, self._texts = tokenizer, body.alternatives, texts
        self._usage, self._include_usage = Usage(body.n), body.stream_options.include_usage
        self._fields = {
            "id": f"{self.prefix}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": f"fp_{fingerprint[:12]}",
        }

    @abstractmethod
    def choice(self, number: int, piece: Piece) -> dict[str, Any]:
        """Return a whole text."""

    def first_choice(self, number: int) -> dict[str, Any] | None:
        """Return the first choice of a text in a stream, if the endpoint has one without content."""
        return None

    @abstractmethod
    def choices(self, number: int, piece: Piece) -> Iterator[dict[str, Any]]:
        """Iterate over the choices of a piece in a stream, each of which is sent in its own chunk."""

    def whole(self, batch: Batch, session: SessionInfo | None) -> dict[str, Any]:
        self._usage.add(batch)
        texts = pieces(batch)
        choices = [self.choice(number, texts[number]) for number in sorted(texts)]
        return {**self.chunk(*choices, usage=self._usage, session=session), "object": self.kind}

    def first(self, branch: str | None) -> list[dict[str, Any]]:
        choices = filter(None, map(self.first_choice, range(self._texts)))
        forked = [{**self.chunk(), "session": {"id": branch, "object": "session"}}] if branch else []
        return [*forked, *map(self.chunk, choices)]

    def events(self, batch: Batch) -> list[dict[str, Any]]:
        self._usage.add(batch)
        events = []
        for number, piece in pieces(batch).items():
            if piece.progress:
                events.append(self.chunk(progress=piece.progress._asdict()))
            if piece.text or piece.tokens or piece.reason:
                events += map(self.chunk, self.choices(number, piece))
        return events

    def last(self, session: SessionInfo | None) -> list[dict[str, Any]]:
        usage = self._usage if self._include_usage else None
        return [self.chunk(usage=usage, session=session)] if session or usage else []

    def chunk(
        self, *choices: dict[str, Any], usage: Usage | None = None, session: SessionInfo | None = None, **more: Any
    ) -> dict[str, Any]:
        """Return one chunk of a stream, with `more` fields."""
        body = {**self._fields, "object": self.chunk_kind, "choices": list(choices), **more}
        if usage:
            body["usage"] = usage.body()
        if session:
            body["session"] = session._asdict()
        return body


class CompletionFormat(TextFormat):
    """/v1/completions"""

    kind = chunk_kind = "text_completion"
    prefix = "cmpl"

    def choice(self, number: int, piece: Piece) -> dict[str, Any]:
        log_probabilities = None
        if self._alternatives is not None:
            log_probabilities = completion_log_probabilities(self._tokenizer, piece.tokens)
        text = printable(piece.text)
        return {"index": number, "text": text, "logprobs": log_probabilities, "finish_reason": piece.reason}

    def choices(self, number: int, piece: Piece) -> Iterator[dict[str, Any]]:
        yield self.choice(number, piece)


class ChatFormat(TextFormat):
    """/v1/chat/completions"""

    kind, chunk_kind = "chat.completion", "chat.completion.chunk"
    prefix = "chatcmpl"

    def choice(self, number: int, piece: Piece) -> dict[str, Any]:
        message = {"role": "assistant", "content": printable(piece.text), "refusal": None}
        rest = {"logprobs": self._log_probabilities(piece.tokens), "finish_reason": piece.reason}
        return {"index": number, "message": message, **rest}

    def first_choice(self, number: int) -> dict[str, Any]:
        return self._delta(number, {"role": "assistant", "content": ""})

    def choices(self, number: int, piece: Piece) -> Iterator[dict[str, Any]]:
        if piece.text or piece.tokens:
            content = self._delta(number, {"content": printable(piece.text)})
            yield {**content, "logprobs": self._log_probabilities(piece.tokens)}
        if piece.reason is not None:
            yield {**self._delta(number, {}), "finish_reason": piece.reason}

    def _delta(self, number: int, delta: dict[str, str]) -> dict[str, Any]:
        return {"index": number, "delta": delta, "logprobs": None, "finish_reason": None}

    def _log_probabilities(self, tokens: Sequence[WrittenToken]) -> dict[str, list] | None:
        if self._alternatives is None:
            return None
        return {
            "content": [
                {**self._entry(*written[:2]), "top_logprobs": [self._entry(*other) for other in written.alternatives]}
                for written in tokens
            ]
        }

    def _entry(self, token: int, log_probability: float) -> dict[str, Any]:
        data = list(self._tokenizer.decode_bytes([token]))
        return {"token": token_name(self._tokenizer, token), "logprob": finite(log_probability), "bytes": data}


def completion_log_probabilities(tokenizer: Tokenizer, tokens: Sequence[WrittenToken]) -> dict[str, list]:
    """Return tokens with their likelihoods, as /v1/completions reports them."""

    def by_name(alternatives: Iterable[TokenLikelihood]) -> dict[str, float]:
        return {token_name(tokenizer, token): finite(value) for token, value in alternatives}

    return {
        "tokens": [token_name(tokenizer, written.token) for written in tokens],
        "token_logprobs": [finite(written.log_probability) for written in tokens],
        "top_logprobs": [by_name(written.alternatives) for written in tokens],
    }


def token_name(tokenizer: Tokenizer, token: int) -> str:
    """Return the text of a token, or OpenAI's notation of bytes that are not whole characters."""
    data = tokenizer.decode_bytes([token])
    if not data:
        names = {number: name for name, number in tokenizer.special.items()}
        return names.get(token) or {tokenizer.bos: "<bos>", tokenizer.eos: "<eos>"}.get(token, f"<{token}>")
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
