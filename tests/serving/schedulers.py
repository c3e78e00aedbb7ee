"""Schedulers of tiny models, and their events."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from queue import Queue
from tempfile import TemporaryDirectory
from typing import Any

from models import FORMS, write_run

import lmlong
from lmlong import recipe
from lmlong.data.tokenizers import train_tokenizer
from lmlong.data.tokenizers.base import Tokenizer
from lmlong.inference.loading import TrainedLanguageModel
from lmlong.inference.state_table import StateTable
from lmlong.serving.request import Event, Request
from lmlong.serving.scheduler import Scheduler
from lmlong.serving.settings import Settings
from lmlong.serving.writer import Writer


def loaded(folder: Path, native: bool = True, **form: Any) -> TrainedLanguageModel:
    write_run(folder, **form)
    trained = lmlong.load(folder)
    if native:
        trained.use_fast_engine()
    return trained


@cache
def tiny(form: str = "elu", native: bool = False, tokenizer: Tokenizer | None = None) -> TrainedLanguageModel:
    """A model that all tests share, so none may change it."""
    with TemporaryDirectory() as folder:
        return loaded(Path(folder) / "run", native, tokenizer=tokenizer, **FORMS[form])


@contextmanager
def running(trained: TrainedLanguageModel, **changed: Any) -> Iterator[Scheduler]:
    """A scheduler until the block ends; `changed` are settings."""
    settings = Settings(**{"memory": 0, **changed})
    scheduler = Scheduler(trained, StateTable(trained, settings.memory), settings)
    try:
        yield scheduler
    finally:
        scheduler.close()


@cache
def subwords() -> Tokenizer:
    """Pieces of words, so that the end of a prompt is open."""
    draw = random.Random(0)
    text = "".join(draw.choice(["abacad", "cab", "bad", "dab"]) + draw.choice([" ", ", ", "\n"]) for _ in range(3000))
    return train_tokenizer([text], recipe.Tokenizer(vocabulary=320))


class Told:
    """The events of one request."""

    def __init__(self, scheduler: Scheduler, request: Request):
        self._events: Queue[Event] = Queue()
        self.writer: Writer = scheduler.submit(request, self._events.put)

    def next(self) -> Event:
        return self._events.get(timeout=60)

    def all(self) -> list[Event]:
        events = [self.next()]
        while not events[-1].end and not events[-1].error:
            events.append(self.next())
        return events

    def text(self) -> str:
        return "".join(event.text for event in self.all())

    def none_are_left(self) -> bool:
        return self._events.empty()
