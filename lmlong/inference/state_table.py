"""States by the digest of the tokens that gave them: a cache, in memory and on disk.

A text is read in pieces. The key of a state is the digest of the key before its last piece and of that piece. The key
of the empty text is the digest of all else that determines a state: the model, its formats and its decoder. So equal
keys mean the same tokens, read in the same pieces, and on a CPU the same bits. Every state may be dropped: reading the
pieces gives it again.
"""

import hashlib
import os
import re
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import accumulate
from pathlib import Path
from threading import RLock
from typing import Literal, NamedTuple

import torch

from lmlong.decode.engine import engine_of
from lmlong.errors import LmlongError
from lmlong.inference import state_file
from lmlong.inference.loading import TrainedLanguageModel
from lmlong.inference.session import Session, advance, begin_learning, first, read_tokens
from lmlong.inference.unread import UnreadText
from lmlong.io.files import staged
from lmlong.model.language_model import LanguageModel
from lmlong.model.state import state_bytes

PIECE = 256
"""Maximum number of tokens of a piece that is read at once."""

KEY_BYTES = 24

NAME = re.compile(rf"[0-9a-f]{{{2 * KEY_BYTES}}}\.state")
UNFINISHED = re.compile(re.escape(staged(Path("NAME")).name).replace("NAME", NAME.pattern))

Kind = Literal["read", "learn", "wrote"]


class Piece(NamedTuple):
    """Tokens that are read at once: a reader's (`read`, or `learn` if they are learned from), or the model's own."""

    kind: Kind
    tokens: tuple[int, ...]

    def key(self, before: bytes) -> bytes:
        """Return the key of the state after this piece, from the key before it."""
        text = before + self.kind.encode() + array("q", self.tokens).tobytes()
        return hashlib.blake2b(text, digest_size=KEY_BYTES).digest()

    @torch.inference_mode()
    def read(self, model: LanguageModel, session: Session | None) -> Session:
        """Return the session after this piece, from the one before it, or None for the empty text."""
        learn, tokens = self.kind == "learn", self.tokens
        if session is None:
            session, tokens = first(model, tokens[0], learn), tokens[1:]
        session = begin_learning(model, session, learn)
        if self.kind == "wrote" and session.state.learned is not None:
            session = advance(model, session, [(token, False) for token in tokens])
        elif tokens:
            session = read_tokens(model, tokens, session)
        return session._replace(state=model.settle(session.state))


def pieces_of(kind: Kind, tokens: Sequence[int]) -> list[Piece]:
    """Divide tokens into pieces."""
    return [Piece(kind, tuple(tokens[begin : begin + PIECE])) for begin in range(0, len(tokens), PIECE)]


class Place(NamedTuple):
    """A place in a text: the key and the session there, which is None before the first token."""

    key: bytes
    session: Session | None = None

    def after(self, model: LanguageModel, pieces: Iterable[Piece]) -> "Place":
        """Return the place after more pieces."""
        place = self
        for piece in pieces:
            place = Place(piece.key(place.key), piece.read(model, place.session))
        return place

    @property
    def tokens(self) -> int:
        return self.session.total if self.session else 0


def places(start: Place, pieces: Sequence[Piece]) -> list[tuple[bytes, int]]:
    """Return the key and the number of tokens before the first of some pieces, and after each."""
    keys = accumulate(pieces, lambda key, piece: piece.key(key), initial=start.key)
    ends = accumulate((len(piece.tokens) for piece in pieces), initial=start.tokens)
    return [*zip(keys, ends, strict=True)]


def superseded(positions: Iterable[int], end: int, apart: int = 0) -> list[int]:
    """Return the positions of states that a text of `end` tokens need not keep: of those whose distances from the end
    are equal to within a factor of 2, all but the first; and those less than `apart` after another or the beginning."""
    kept = dict[int, int]()  # positions by distance
    dropped = []
    for position in sorted(positions):
        distance = (end - position).bit_length()
        if position < end and (distance in kept or position - max(kept.values(), default=0) < apart):
            dropped.append(position)
        else:
            kept[distance] = position
    return dropped


class StateTable:
    """The states of one model, for any thread: the latest used, of up to `memory` bytes, and files of up to `disk`
    bytes in a folder."""

    def __init__(self, trained: TrainedLanguageModel, memory: int, folder: Path | None = None, disk: int = 0):
        model = trained.model
        formats = [model.weight_format, type(engine_of(model)).__name__, *sorted(trained.owners.items())]
        dtypes = {name: str(x.dtype) for name, x in state_file.empty_tensors(model, ()).items()}
        self.empty = hashlib.blake2b(repr((formats, dtypes)).encode(), digest_size=KEY_BYTES).digest()
        """The key of the empty text."""
        self.bytes = self.disk_bytes = 0
        self._trained, self._memory, self._folder, self._disk = trained, memory, folder, disk
        self._lock = RLock()
        self._states: OrderedDict[bytes, Session] = OrderedDict()  # the latest used last, as in `files`
        self.files: OrderedDict[bytes, int] = OrderedDict()
        """The sizes of the files, by their keys."""
        if folder is not None and folder.is_dir():
            self._find(folder)

    def get(self, key: bytes) -> Session | None:
        """Return the session with a key, without unread text; None if it is not known."""
        with self._lock:
            if key in self._states:
                self._states.move_to_end(key)
                return self._states[key]
            if key not in self.files:
                return None
        path = self._path(key)
        try:
            session = self._trained.load_state(path, learn=False)
            os.utime(path)
        except (LmlongError, OSError):
            self.remove(key)
            return None
        with self._lock:
            if key in self.files:
                self.files.move_to_end(key)
        self.put(Place(key, session))
        return session

    def put(self, place: Place) -> None:
        """Keep a state in memory."""
        key, session = place
        assert session is not None
        session = session._replace(unread=UnreadText())
        if state_bytes(session) > self._memory:
            return
        with self._lock:
            self.forget(key)
            self._states[key] = session
            self.bytes += state_bytes(session)
            while self.bytes > self._memory:
                self.forget(next(iter(self._states)))

    def forget(self, key: bytes) -> None:
        """Drop a state from memory."""
        with self._lock:
            if key in self._states:
                self.bytes -= state_bytes(self._states.pop(key))

    def nearest(self, start: Place, pieces: Sequence[Piece]) -> tuple[Place, int]:
        """Return the place after as many of the pieces as have a known state, and their number."""
        for number, (key, tokens) in [*enumerate(places(start, pieces))][:0:-1]:
            place = Place(key, self.get(key))
            if place.tokens == tokens:
                return place, number
        return start, 0

    def save(self, place: Place) -> None:
        """Keep a state on disk too, if that takes it and does not have it."""
        key, session = place
        assert session is not None
        if not self._disk or self._folder is None or key in self.files:
            return
        trained, path = self._trained, self._path(key)
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            whose = trained.model, trained.owners, trained.tokenizer, str(trained.checkpoint)
            state_file.save(path, session._replace(unread=UnreadText()), *whose, durable=False)
            size = path.stat().st_size
        except (LmlongError, OSError):  # such as a full disk: the state can be read again
            return
        with self._lock:
            self.disk_bytes += size
            self.files[key] = size
        self._evict()

    def remove(self, key: bytes) -> None:
        """Drop a state from disk."""
        with self._lock:
            self.disk_bytes -= self.files.pop(key, 0)
        state_file.delete(self._path(key))

    def _path(self, key: bytes) -> Path:
        assert self._folder is not None
        return self._folder / f"{key.hex()}.state"

    def _find(self, folder: Path) -> None:
        """Find the files of an earlier run, and delete those that it did not finish."""
        found = []
        for path in folder.iterdir():
            if NAME.fullmatch(path.name) and path.is_file():
                about = path.stat()
                found.append((about.st_mtime, path.name, about.st_size))
            elif UNFINISHED.fullmatch(path.name):
                state_file.delete(path)
        for _, name, size in sorted(found):
            self.files[bytes.fromhex(name.removesuffix(".state"))] = size
            self.disk_bytes += size
        self._evict()

    def _evict(self) -> None:
        """Drop the states used least recently, if the files are more than may be on disk."""
        with self._lock:
            while self.disk_bytes > self._disk:
                self.remove(next(iter(self.files)))
