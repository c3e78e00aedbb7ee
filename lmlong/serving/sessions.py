"""Sessions of clients, each a file on disk; the most recently used ones are in memory too.

A session is written to its file before the client gets a response, so none is lost however the server ends. The file
holds what differs from the session that it continues, and the name of the session that it was forked from. Of a short
turn it holds only the tokens: the session then becomes what reading them gives, in memory too.
"""

import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import Lock, RLock
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lmlong.errors import CheckpointError, LmlongError, UsageError
from lmlong.inference import session_file, sparse, state_file
from lmlong.inference.awake import AwakeSessions
from lmlong.inference.loading import TrainedLanguageModel
from lmlong.inference.session import Session, read_tokens
from lmlong.inference.session_file import Known, Packed
from lmlong.io.lock import Held, lock
from lmlong.io.system_errors import explain_errors
from lmlong.model.sampling_options import RECENT
from lmlong.model.state import state_bytes
from lmlong.serving.session_folder import STAGED, Kept, SessionFolder, has_own_header
from lmlong.serving.session_info import SessionInfo, info_of
from lmlong.serving.settings import DEFAULT_SETTINGS, Settings

SMALL = 1 << 14
"""Bytes of a base below which its turns are stored as states: a file takes up 4 KiB of a disk anyway."""


class UnknownSession(LmlongError):
    """The requested session does not exist."""


class NoState(LmlongError):
    """An upload that is not a state of this model."""


class QuotaReached(LmlongError):
    """There is the maximum number of sessions, or of their bytes."""


class LearnsAlready(LmlongError):
    """A request asks a session that learns from its text not to."""


def check_learn(session: Session, learn: bool | None) -> None:
    """Refuse the `learn` of a request that continues a session: what was learned stays in its state, and is used."""
    if session.state.learned is not None and learn is False:
        raise LearnsAlready(
            "learn: false, but this session learns until its end. Leave learn out, or create another session."
        )


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder of sessions, which is created if missing."""
    with explain_errors(folder):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        with lock(folder / "lock"):
            yield
    except Held:
        remedy = "Name another folder by --sessions."
        raise UsageError(f"{folder}: another server keeps its sessions there. {remedy}") from None


class Page(NamedTuple):
    """A part of a list of sessions."""

    infos: list[SessionInfo]
    next: str | None
    """Where the rest begins, if there is more."""


class SessionStore:
    """The sessions of a server, from any thread."""

    def __init__(self, trained: TrainedLanguageModel, folder: Path, settings: Settings = DEFAULT_SETTINGS):
        self.folder = folder
        self.trained, self._settings = trained, settings
        self._lock = RLock()  # of what is in memory
        self._disk = Lock()  # of the files
        self._limit = session_file.limit_of(trained.model)
        self._awake = AwakeSessions[str](settings.memory)
        self._files = SessionFolder(folder, trained.owners)
        self._infos = self._files.found  # by id

    def create(self, session: Session, parent: str | None = None, before: Session | None = None) -> SessionInfo:
        """Save a new session. With a `parent`, `before` is what `get` returned for it."""
        with self._lock:
            if len(self._infos) >= self._settings.max_sessions:
                raise QuotaReached(f"{len(self._infos):,} sessions are all that this server keeps. Delete some.")
        with self._disk:
            base = self._base(parent, before)
            return self._write(secrets.token_hex(12), session, base, before, parent, time.time())

    def update(self, name: str, session: Session, before: Session | None = None) -> SessionInfo:
        """Save what a session has become; `before` is what `get` returned for it."""
        info = self.info(name)
        before = self.get(name) if before is None else before
        with self._disk:
            base = self._base(name, before)
            return self._write(name, session, base, before, info.parent, info.made)

    def fork(self, name: str) -> SessionInfo:
        """Save a copy of a session as a new one."""
        session = self.get(name)
        return self.create(session, name, session)

    def upload(self, data: bytes, learn: bool | None = None) -> SessionInfo:
        """Save the session of a state file, which may be hostile. `learn` works as in `load_state`."""
        path = self.folder / f".{secrets.token_hex(12)}{STAGED}"
        try:
            if not has_own_header(data):
                raise UsageError
            with explain_errors(path):
                path.touch(state_file.PRIVATE)
                path.write_bytes(data)
            session = self.trained.load_state(path, learn)
            check_learn(session, learn)
        except (CheckpointError, UsageError):
            raise NoState("This is not a state of this model, or it is damaged. Read the text again.") from None
        finally:
            path.unlink(missing_ok=True)
        return self.create(session)

    def get(self, name: str) -> Session:
        """Return a session from memory, or from its file."""
        self.info(name)
        with self._lock:
            session = self._awake.get(name)
            if session is not None:
                return session
        with self._disk:
            session = self._load(name)
        with self._lock:
            self._awake.put(name, session)
        return session

    def info(self, name: str) -> SessionInfo:
        """Return a session's info. A session whose file was removed is unknown."""
        with self._lock:
            info = self._infos.get(name)
        if info is not None and not self._files.path(name).exists():
            self._forget(name)
            info = None
        if info is None:
            raise UnknownSession(f"There is no session {name!r}.")
        return info

    def list(self) -> list[SessionInfo]:
        """Return the sessions, the oldest first."""
        with self._lock:
            return sorted(self._infos.values(), key=lambda info: info.cursor)

    def page(self, most: int, after: str | None = None) -> Page:
        """Return up to `most` sessions, the oldest first, after those that earlier pages had."""
        infos = self.list()
        if after is not None:
            infos = [info for info in infos if info.cursor > after]
        return Page(infos[:most], infos[most - 1].cursor if len(infos) > most else None)

    def delete(self, name: str) -> None:
        self.info(name)
        self._forget(name)

    def file(self, name: str) -> bytes:
        """Return a session as a state file."""
        session, trained = self.get(name), self.trained
        path = self.folder / f".{secrets.token_hex(12)}{STAGED}"
        try:
            state_file.save(
                path, session, trained.model, trained.owners, trained.tokenizer, str(trained.checkpoint), durable=False
            )
            return path.read_bytes()
        finally:
            path.unlink(missing_ok=True)

    @property
    def count(self) -> int:
        with self._lock:
            return len(self._infos)

    @property
    def file_bytes(self) -> int:
        return self._files.bytes

    @property
    def awake_bytes(self) -> int:
        return self._awake.bytes

    def _base(self, name: str | None, before: Session | None) -> Kept | None:
        """Return the file of a session; None if the session has changed since `before`."""
        with self._lock:
            info = self._infos.get(name) if name else None
        is_same = info is not None and before is not None and info.tokens == int(before.total)
        return self._files.live.get(info.id) if info is not None and is_same else None

    def _load(self, name: str) -> Session:
        try:
            return self._read(self._files.live[name])
        except ValueError as error:
            raise CheckpointError(f"{self._files.path(name)}: {error}. Read the text again.") from None

    def _read(self, kept: Kept) -> Session:
        """Return a session from its file and those of its bases, or from the first of these that is in memory."""
        model, tokenizer, file = self.trained.model, self.trained.tokenizer, kept.file
        if file.pieces is None:
            tensors = session_file.tensors_of(self._chain(kept), model, self._limit)
            return state_file.restored(tensors, model, tokenizer)
        assert kept.base is not None
        session = self._in_memory(kept.base) or self._read(kept.base)
        most = model.embedding.num_embeddings - 1
        for piece in file.pieces:
            if not 0 <= min(piece) <= max(piece) <= most:
                raise ValueError("it has tokens that the model does not have")
            session = read_tokens(model, piece, session)
        return state_file.restored_unread(session, file.whole(self._limit), model, tokenizer)

    def _in_memory(self, kept: Kept) -> Session | None:
        with self._lock:
            return self._awake.get(kept.session) if kept.is_live else None

    def _chain(self, kept: Kept) -> Iterator[Known]:
        for each in kept.chain():
            session = self._in_memory(each)
            yield Known(each.file, None if session is None else state_file.tensors_of(session))

    @torch.inference_mode()
    def _write(
        self,
        name: str,
        session: Session,
        base: Kept | None,
        before: Session | None,
        parent: str | None,
        made: float,
    ) -> SessionInfo:
        """Write a session, as what differs from `before`, the session in the file `base`, if that is worth it."""
        trained = self.trained
        turn = self._turn(session, base, before)
        if turn is None:
            pieces, session = None, session._replace(state=trained.model.settle(session.state))
            base, packed = self._packed(state_file.tensors_of(session), base, before, name)
        else:
            assert base is not None and before is not None
            pieces = (*(base.file.pieces or ()), *filter(None, [turn]))
            read = read_tokens(trained.model, turn, before) if turn else before
            base, session = base.state, read._replace(unread=session.unread)
            packed = session_file.pack(state_file.tensors_of_unread(session), self._limit)
        about: dict[str, Any] = {"id": name, "run": str(trained.checkpoint), "tokens": int(session.total)}
        about |= {"tail": state_file.tail_of(session, trained.tokenizer), "parent": parent}
        about |= {"made": made, "learns": session.state.learned is not None, "state_bytes": state_bytes(session)}
        staged = self._files.staged(name)
        try:
            about |= trained.owners
            file = session_file.save(staged, about, packed, base.name if base else None, pieces)
            size = staged.stat().st_size
            held = self._files.bytes - self._files.freed(name, base)
            if held + size > self._settings.max_session_bytes:
                most = self._settings.max_session_bytes
                raise QuotaReached(f"{most:,} bytes of sessions are all that this server keeps. Delete some.")
            self._files.put(Kept(file, name, size, base))
        finally:
            staged.unlink(missing_ok=True)
        with self._lock:
            info = self._infos[name] = info_of(name, about, size)
            self._awake.put(name, session)
        return info

    def _turn(self, session: Session, base: Kept | None, before: Session | None) -> tuple[int, ...] | None:
        """Return the tokens since `before` if the file is to hold only these, and those before them since a base with a
        state; None if it is to hold the state. On a GPU, reading may not give the same bits again."""
        if base is None or before is None or base.whole_bytes < SMALL:
            return None
        if session.state.learned is not None or session.last.device.type != "cpu":
            return None
        new = int(session.total) - int(before.total)
        kept, known = RECENT - new, sum(map(len, base.file.pieces or ()))
        if new < 0 or known + new > session_file.MOST_READ:
            return None
        if not torch.equal(session.recent[:, :kept], before.recent[:, new:]):
            return None
        return tuple(session.recent[0, kept:].tolist())

    def _packed(
        self, tensors: Mapping[str, Tensor], base: Kept | None, before: Session | None, name: str
    ) -> tuple[Kept | None, Packed]:
        """Return the parts of a file for tensors, and its base, or None if it is better without."""
        if base is not None and base.state is not base:
            base = base.state
            try:
                before = self._in_memory(base) or self._read(base)
            except (CheckpointError, ValueError):  # its file was removed or damaged
                before = None
        if base is not None and before is not None:
            changed = sparse.pack(tensors, state_file.tensors_of(before))
            old = self._files.live.get(name)
            others = base.users - (old is not None and old.base is base)
            if base.session == name and base.base is not None and not others:  # so that it need not be kept
                changed = sparse.merged(tensors, base.file.rows(self._limit), changed)
                base = base.base
            packed = session_file.pack(changed, self._limit)
            if base.takes(len(packed.rows), packed.bytes):
                return base, packed
        empty = state_file.empty_tensors(self.trained.model, tensors)
        return None, session_file.pack(sparse.pack(tensors, empty), self._limit)

    def _forget(self, name: str) -> None:
        with self._disk, self._lock:
            if name in self._files.live:
                self._awake.pop(name)
                del self._infos[name]
                self._files.remove(name)
