"""The bodies of answers, in OpenAI's shapes: whole, and in pieces of a stream."""

import re
import secrets
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from lmlong.data.tokenizers.base import Tokenizer
from lmlong.serving.inbox import Batch
from lmlong.serving.request import TokenLikelihood, WrittenToken
from lmlong.serving.sessions import SessionInfo

REASONS = {"eos": "stop", "stop": "stop", "max_tokens": "length"}

SURROGATES = re.compile("[\ud800-\udfff]")


def printable(text: str) -> str:
    """Return a text without surrogates, which a model may write and JSON cannot hold."""
    return SURROGATES.sub("\ufffd", text)


def finite(log_probability: float) -> float:
    """Return a log-probability as OpenAI tells it, for JSON has no -inf."""
    return max(log_probability, -9999.0)


@dataclass
class Piece:
    """What was written of one text."""

    text: str = ""
    tokens: list[WrittenToken] = field(default_factory=list)
    reason: str | None = None


@dataclass
class Usage:
    """Tokens that were read and written; a prompt counts once, however many texts follow it."""

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
    """Return what a batch of events adds to each text."""
    found: dict[int, Piece] = {}
    for number, event in batch:
        piece = found.setdefault(number, Piece())
        piece.text += event.text
        if event.token is not None:
            piece.tokens.append(event.token)
        if event.end is not None:
            piece.reason = REASONS[event.end]
    return found


def session_body(info: SessionInfo) -> dict[str, Any]:
    """Return what clients are told of a session."""
    about = {"id": info.id, "object": "session", "parent": info.parent, "created": int(info.made)}
    return {**about, "tokens": info.tokens, "bytes": info.bytes, "tail": printable(info.tail)}


class Shape(Protocol):
    """How texts look in an answer."""

    kind: str
    chunk_kind: str
    prefix: str

    def choice(self, number: int, piece: Piece) -> dict[str, Any]:
        """Return a whole text."""

    def beginning(self, number: int) -> dict[str, Any] | None:
        """Return what begins a stream of a text, if anything does."""

    def deltas(self, number: int, piece: Piece) -> Iterator[dict[str, Any]]:
        """Iterate over what a stream tells of a piece."""


class CompletionShape:
    """/v1/completions"""

    kind = chunk_kind = "text_completion"
    prefix = "cmpl"

    def __init__(self, tokenizer: Tokenizer, alternatives: int | None):
        self._tokenizer, self._alternatives = tokenizer, alternatives

    def choice(self, number: int, piece: Piece) -> dict[str, Any]:
        log_probabilities = None if self._alternatives is None else self._told(piece.tokens)
        text = printable(piece.text)
        return {"index": number, "text": text, "logprobs": log_probabilities, "finish_reason": piece.reason}

    def beginning(self, number: int) -> None:
        return None

    def deltas(self, number: int, piece: Piece) -> Iterator[dict[str, Any]]:
        yield self.choice(number, piece)

    def _told(self, tokens: Sequence[WrittenToken]) -> dict[str, list]:
        def named(likely: Iterable[TokenLikelihood]) -> dict[str, float]:
            return {token_name(self._tokenizer, token): finite(value) for token, value in likely}

        return {
            "tokens": [token_name(self._tokenizer, written.token) for written in tokens],
            "token_logprobs": [finite(written.log_probability) for written in tokens],
            "top_logprobs": [named(written.alternatives) for written in tokens],
        }


class ChatShape:
    """/v1/chat/completions"""

    kind, chunk_kind = "chat.completion", "chat.completion.chunk"
    prefix = "chatcmpl"

    def __init__(self, tokenizer: Tokenizer, alternatives: int | None):
        self._tokenizer, self._alternatives = tokenizer, alternatives

    def choice(self, number: int, piece: Piece) -> dict[str, Any]:
        message = {"role": "assistant", "content": printable(piece.text), "refusal": None}
        rest = {"logprobs": self._told(piece.tokens), "finish_reason": piece.reason}
        return {"index": number, "message": message, **rest}

    def beginning(self, number: int) -> dict[str, Any]:
        return self._delta(number, {"role": "assistant", "content": ""})

    def deltas(self, number: int, piece: Piece) -> Iterator[dict[str, Any]]:
        if piece.text or piece.tokens:
            told = self._told(piece.tokens)
            yield {**self._delta(number, {"content": printable(piece.text)}), "logprobs": told}
        if piece.reason is not None:
            yield {**self._delta(number, {}), "finish_reason": piece.reason}

    def _delta(self, number: int, delta: dict[str, str]) -> dict[str, Any]:
        return {"index": number, "delta": delta, "logprobs": None, "finish_reason": None}

    def _told(self, tokens: Sequence[WrittenToken]) -> dict[str, list] | None:
        if self._alternatives is None:
            return None
        content = [
            {**self._likely(written[:2]), "top_logprobs": [self._likely(likely) for likely in written.alternatives]}
            for written in tokens
        ]
        return {"content": content}

    def _likely(self, likely: tuple[int, float]) -> dict[str, Any]:
        token, value = likely
        data = list(self._tokenizer.decode_bytes([token]))
        return {"token": token_name(self._tokenizer, token), "logprob": finite(value), "bytes": data}


def token_name(tokenizer: Tokenizer, token: int) -> str:
    """Return the text of a token; OpenAI's way to write bytes where they are no whole characters."""
    data = tokenizer.decode_bytes([token])
    if not data:
        names = {number: name for name, number in tokenizer.special.items()}
        return names.get(token) or {tokenizer.bos: "<bos>", tokenizer.eos: "<eos>"}.get(token, f"<{token}>")
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


class Envelope:
    """What stands around the texts of one answer."""

    def __init__(self, shape: Shape, model: str, fingerprint: str):
        self.shape = shape
        self._own = {"id": f"{shape.prefix}-{secrets.token_hex(12)}", "created": int(time.time()), "model": model}
        self._fingerprint = {"system_fingerprint": f"fp_{fingerprint[:12]}"}

    def whole(self, found: dict[int, Piece], usage: Usage, session: SessionInfo | None) -> dict[str, Any]:
        choices = [self.shape.choice(number, found[number]) for number in sorted(found)]
        told = {"session": session_body(session)} if session else {}
        return {**self._of(self.shape.kind), "choices": choices, "usage": usage.body(), **told}

    def chunk(
        self, choice: dict[str, Any] | None, usage: Usage | None = None, session: SessionInfo | None = None
    ) -> dict[str, Any]:
        """Return one piece of a stream, the last of which tells the usage and the session alone."""
        told = {"usage": usage.body()} if usage else {}
        told |= {"session": session_body(session)} if session else {}
        return {**self._of(self.shape.chunk_kind), "choices": [choice] if choice else [], **told}

    def _of(self, kind: str) -> dict[str, Any]:
        return {**self._own, "object": kind, **self._fingerprint}
