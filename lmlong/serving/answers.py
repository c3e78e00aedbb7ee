"""Response bodies in OpenAI's formats, whole and as chunks of a stream."""

import re
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from lmlong.data.tokenizers.base import Tokenizer
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


def session_body(info: SessionInfo) -> dict[str, Any]:
    """Return a session as JSON."""
    about = {"id": info.id, "object": "session", "parent": info.parent, "created": int(info.made)}
    sizes = {"tokens": info.tokens, "bytes": info.bytes, "state_bytes": info.state_bytes}
    texts = {"given": info.given, "written": info.written, "tail": printable(info.tail)}
    return {**about, **sizes, "learns": info.learns, **texts}


def text_body(name: str, passages: Sequence[Passage], tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the text that a session adds to its parent's as JSON."""
    parts = []
    for by, data, tokens in passages:
        log_probabilities = completion_log_probabilities(tokenizer, tokens) if tokens else None
        parts.append({"by": by, "text": data.decode(errors="replace"), "logprobs": log_probabilities})
    return {"id": name, "object": "session.text", "passages": parts}


def progress_body(progress: Progress) -> dict[str, Any]:
    """Return the progress of reading as JSON."""
    return {"object": "progress", "read_bytes": progress.read, "total_bytes": progress.total}


class ResponseFormat(ABC):
    """The bodies of responses of one endpoint, whole and as chunks of a stream."""

    kind: str
    chunk_kind: str
    prefix: str

    def __init__(self, tokenizer: Tokenizer, alternatives: int | None, model: str, fingerprint: str):
        """`alternatives` is None if log-probabilities are not requested."""
        self._tokenizer, self._alternatives = tokenizer, alternatives
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

    def whole(self, texts: dict[int, Piece], usage: Usage, session: SessionInfo | None) -> dict[str, Any]:
        choices = [self.choice(number, texts[number]) for number in sorted(texts)]
        return {**self.chunk(*choices, usage=usage, session=session), "object": self.kind}

    def chunk(
        self, *choices: dict[str, Any], usage: Usage | None = None, session: SessionInfo | None = None, **more: Any
    ) -> dict[str, Any]:
        """Return one chunk of a stream, with `more` fields."""
        body = {**self._fields, "object": self.chunk_kind, "choices": list(choices), **more}
        if usage:
            body["usage"] = usage.body()
        if session:
            body["session"] = session_body(session)
        return body


class CompletionFormat(ResponseFormat):
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


class ChatFormat(ResponseFormat):
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
