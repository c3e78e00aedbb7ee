"""Turns of sessions, made without a scheduler, and stores that keep them."""

import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from lmlong.attention.base import state_tensors
from lmlong.inference.loading import TrainedLanguageModel
from lmlong.inference.session import Session, greedy
from lmlong.inference.state_table import Place, pieces_of
from lmlong.serving.request import Turn
from lmlong.serving.session_file import SessionInfo
from lmlong.serving.session_store import SessionStore
from lmlong.serving.settings import Settings

BOOK = "".join(random.Random(0).choices("abcd", k=3000))
TEXTS = ["abc", "dcba", "bad", "cab dab", "a", "dd ab"]


def opened(trained: TrainedLanguageModel, folder: Path, **changed: Any) -> SessionStore:
    """A store without states in memory, as a server has it after a start."""
    return SessionStore(trained, folder, Settings(**{"memory": 0, **changed}))


def turn(store: SessionStore, text: str, place: Place | None = None, answer: int = 0, learn: bool = False) -> Turn:
    """A turn that reads a text, byte by byte, and writes an answer of some tokens."""
    trained = store.trained
    bos = [] if place else [trained.tokenizer.bos]
    prompt = pieces_of("learn" if learn else "read", [*bos, *trained.tokenizer.encode(text)])
    read = (place or Place(store.states.empty)).after(trained.model, prompt)
    assert read.session is not None
    written: list[int] = []
    if answer:
        session = greedy(trained.model, read.session, answer)
        written = [*session.recent[-answer:]]
    return Turn(read, tuple(prompt), tuple(pieces_of("wrote", written)), learn=learn)


def created(store: SessionStore, text: str = "abc", **options: Any) -> str:
    return store.save(turn(store, text, **options)).id


def continued(store: SessionStore, name: str, text: str, **options: Any) -> str:
    return store.save(turn(store, text, place(store, name), **options), name).id


def forked(store: SessionStore, name: str, text: str, **options: Any) -> str:
    """A fork of a session, with a turn of its own."""
    return continued(store, store.fork(name).id, text, **options)


def listed(store: SessionStore) -> list[SessionInfo]:
    """All sessions, the oldest first."""
    return [*store.page(sys.maxsize)[0]]


def place(store: SessionStore, name: str) -> Place:
    """The place where a session ends."""
    *_, end = store.start(name, False)
    assert end is not None
    return end[0]


def session(store: SessionStore, name: str) -> Session:
    found = place(store, name).session
    assert found is not None
    return found


def grown(store: SessionStore, texts: list[str] = TEXTS) -> dict[str, Session]:
    """A book, and turns with answers of which each is a fork of the one before; the sessions by their ids."""
    name = created(store, BOOK)
    found = {name: session(store, name)}
    for text in texts:
        name = forked(store, name, text, answer=5)
        found[name] = session(store, name)
    return found


def bits(session: Session) -> Iterator[bytes]:
    for x in state_tensors(session):
        yield x.clone(memory_format=torch.contiguous_format).flatten().view(torch.uint8).numpy().tobytes()


def is_equal(one: Session, other: Session) -> bool:
    return one[1:] == other[1:] and list(bits(one)) == list(bits(other))


def without_states(folder: Path) -> None:
    """Delete all states that can be computed again."""
    for path in (folder / "states").glob("*"):
        path.unlink()


def files(folder: Path) -> set[str]:
    """The names of all files but of states that can be computed again."""
    return {
        str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file() and "states" not in path.parts
    }


def size(folder: Path) -> int:
    return sum((folder / name).stat().st_size for name in files(folder))
