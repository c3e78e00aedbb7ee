"""Conversations by the chat template of a model's tokenizer. The state is kept, so no message is read twice."""

import atexit
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from lmlong.data.tokenizers.base import Tokenizer
from lmlong.errors import UsageError
from lmlong.inference.drafts import Drafts
from lmlong.inference.generation import Generation
from lmlong.inference.session import Session, prefill
from lmlong.io.limited_process import LimitedProcess, RequestFailed
from lmlong.model.language_model import LanguageModel
from lmlong.model.sampling_options import DEFAULTS, MAX_TOKENS, Sampling

Message = dict[str, str]
"""`role` (system, user or assistant) and `content`."""

APART = "\ufdd0"
"""Inserted into text in a message that looks like a special token, so that it stays text. It is a Unicode
noncharacter."""

SECONDS = 10.0
"""Time limit of rendering, including the start of the process that renders."""

RENDERER = LimitedProcess("lmlong.inference.chat_template")
atexit.register(RENDERER.close)


class Conversation:
    """Messages and the session after them. The tokenizer must have a chat template."""

    def __init__(self, model: LanguageModel, tokenizer: Tokenizer, system: str | None = None, learn: bool = False):
        self.model, self.tokenizer = model, tokenizer
        self.messages: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        self._learn = learn
        self._session: Session | None = None
        self._read = ""  # the rendered text that the session has read

    def say(
        self, text: str, options: Sampling | None = None, max_tokens: int | None = MAX_TOKENS, **sampling: Any
    ) -> Iterator[str]:
        """Iterate over the pieces of the answer to a message; a complete answer is added to the messages.

        >>> for piece in talk.say("Hello.", temperature=0.5, seed=3):
        ...     print(piece, end="", flush=True)

        `sampling` overrides single `options`. The loop penalty applies to each answer separately, so an answer may
        repeat earlier messages.
        """
        return self._answer(text, replace(options or DEFAULTS, **sampling), max_tokens)

    def _answer(self, text: str, options: Sampling, max_tokens: int | None) -> Iterator[str]:
        self.messages.append({"role": "user", "content": text})
        numbers = [(len(self.messages),)]
        generation = Generation(
            self.model, self.tokenizer, self._prompted(), options, numbers, max_tokens, drafts=Drafts()
        )
        answer = ""
        for _, piece in generation:
            answer += piece
            yield piece
        self.messages.append({"role": "assistant", "content": answer})
        self._session, self._read = generation.session, self._read + apart(self.tokenizer, answer)

    def _prompted(self) -> Session:
        """Return the session up to the beginning of the next answer."""
        text = render(self.tokenizer, self.messages)
        if self._session is None or not text.startswith(self._read):  # some templates change earlier messages
            self._session, self._read = None, ""
        tokens = list(encode(self.tokenizer, text[len(self._read) :]))
        self._session = prefill(self.model, [tokens], self._session, self._learn)
        self._read = text
        return self._session


def render(tokenizer: Tokenizer, messages: Sequence[Message]) -> str:
    """Return the rendered messages up to the beginning of the answer, with APART in them."""
    names = {token: name for name, token in tokenizer.special.items()}
    ends = {f"{end}_token": names.get(getattr(tokenizer, end), "") for end in ("bos", "eos")}
    inert = [{key: apart(tokenizer, text) for key, text in message.items()} for message in messages]
    request = {"template": tokenizer.chat_template or "", "messages": inert, "ends": ends}
    try:
        text = RENDERER.ask(request, SECONDS).decode("utf-8", "surrogatepass")
    except RequestFailed as error:
        raise UsageError(
            f"the model's chat template cannot render these messages ({error}). Change them, or use another model."
        ) from None
    if not text:
        raise UsageError(
            "the model's chat template renders these messages as an empty text. Use a model made for chat."
        )
    return text


def encode(tokenizer: Tokenizer, text: str) -> Iterator[int]:
    """Iterate over the tokens of a rendered text: its special tokens, and the tokens of the text between them."""
    pieces = _special(tokenizer).split(text)
    return chain.from_iterable(
        [tokenizer.special[piece]] if number % 2 else tokenizer.encode(piece.replace(APART, ""))
        for number, piece in enumerate(pieces)
    )


def apart(tokenizer: Tokenizer, text: str) -> str:
    """Return a message's text with APART inserted into everything that looks like a special token."""
    return _special(tokenizer).sub(lambda special: special[0][0] + APART + special[0][1:], text.replace(APART, ""))


def _special(tokenizer: Tokenizer) -> re.Pattern[str]:
    """Return a pattern of the names of special tokens, longest first; without names it matches nothing."""
    names = sorted(tokenizer.special, key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, names)) or '(?!)'})")
