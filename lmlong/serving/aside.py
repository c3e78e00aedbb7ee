"""Work beside the engine, in threads of its own: texts that are scored, and templates of chats."""

import asyncio
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import NamedTuple, TypeVar

from tqdm import tqdm

from lmlong.data.token_file import tokens_of
from lmlong.evaluation.scorer import Scorer
from lmlong.evaluation.spans import documents_of, whole
from lmlong.inference import chat
from lmlong.inference.loading import TrainedLanguageModel
from lmlong.serving.api_errors import busy
from lmlong.serving.engine import Closed

Result = TypeVar("Result")
Ended = Callable[[], bool]
"""Whether nobody waits for a job any more; asked between the pieces of a text."""


class Worker:
    """One job at a time; a bounded number of them wait."""

    def __init__(self, name: str, most: int):
        self._most, self._jobs = most, 0
        self._pool = ThreadPoolExecutor(1, name)
        self._closed = Event()

    async def run(self, job: Callable[[Ended], Result]) -> Result:
        """Return what a job gives; who ceases to wait for it ends it."""
        if self._closed.is_set():
            raise Closed("The server is shutting down.")
        if self._jobs >= self._most:
            raise busy(f"{self._most} requests wait for this already. Try again later.")
        left = Event()
        self._jobs += 1
        try:
            ended = lambda: left.is_set() or self._closed.is_set()  # noqa: E731
            return await asyncio.get_running_loop().run_in_executor(self._pool, job, ended)
        finally:
            left.set()
            self._jobs -= 1

    def close(self) -> None:
        """End all jobs."""
        self._closed.set()
        self._pool.shutdown(wait=False, cancel_futures=True)


class Score(NamedTuple):
    """What a model gives a text, as one document after nothing, with its end."""

    tokens: int
    bytes: int
    bits: float


def score(trained: TrainedLanguageModel, text: str, ended: Ended) -> Score:
    """Return the same sums as `lmlong.evaluate` with `precision="32"`."""
    tokens = tokens_of([text], trained.tokenizer)
    documents = documents_of(tokens)
    scorer = Scorer(trained.model, tokens.tokens, documents, trained.tokenizer, trained.device)
    sums = documents.sums()
    for _, first, nats, _ in scorer.scored(whole(documents), tqdm(disable=True)):
        if ended():
            raise Closed("The server is shutting down.")
        sums.add(0, nats.sum(), len(nats), scorer.sizes(slice(first, first + len(nats))).sum())
    totals = sums.totals
    return Score(totals.tokens, totals.bytes, totals.nats / math.log(2))


def chat_tokens(trained: TrainedLanguageModel, messages: Sequence[chat.Message], ended: Ended) -> tuple[int, ...]:
    """Return the tokens of messages, up to where the answer to them begins."""
    return tuple(chat.encode(trained.tokenizer, chat.render(trained.tokenizer, messages)))
