"""Sessions of clients: states that go on, each a file on disk, the latest used ones in memory too.

A session is written to its file before anybody is told that it is there, so none is lost however the server ends, and
to let one sleep is to forget it. The file is that of `lmlong state`, with who owns it and what it was forked from.
"""

import hashlib
import secrets
import time
from collections import Counter
from pathlib import Path
from threading import RLock
from typing import IO, Any, NamedTuple

import torch

from lmlong.errors import CheckpointError, LmlongError, UsageError
from lmlong.inference import state_file
from lmlong.inference.awake import AwakeSessions
from lmlong.inference.loading import TrainedLanguageModel
from lmlong.inference.session import Session
from lmlong.io.lock import lock_file
from lmlong.io.system_errors import explain_errors
from lmlong.serving.settings import DEFAULT_SETTINGS, Settings

SUFFIX, STAGED = ".state", ".new"
EVERYBODY = "everybody"
"""The owner of what is made without a key."""


class UnknownSession(LmlongError):
    """There is no such session, or it belongs to another key."""


class NoState(LmlongError):
    """What was sent is no state of this model."""


class QuotaReached(LmlongError):
    """An owner has as many bytes or sessions as he may."""


class SessionInfo(NamedTuple):
    """What is told of a session."""

    id: str
    parent: str | None
    """The session that it was forked from."""
    made: float
    """Seconds since 1970."""
    tokens: int
    bytes: int
    """Of its file."""
    tail: str
    """The end of its text."""


def owner_of(key: str | None) -> str:
    """Return the owner that an API key stands for; no file holds the key itself."""
    return EVERYBODY if key is None else hashlib.sha256(b"lmlong session owner " + key.encode()).hexdigest()[:32]


def lock_folder(folder: Path) -> IO[bytes]:
    """Return the lock of a folder of sessions, which is held until its process ends or the lock is closed."""
    with explain_errors(folder):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = (folder / "lock").open("ab")
    if not lock_file(file.fileno(), wait=False):
        file.close()
        raise UsageError(f"{folder}: another server keeps its sessions there. Name another folder by --sessions.")
    return file


class SessionStore:
    """The sessions of all owners, from any thread."""

    def __init__(self, trained: TrainedLanguageModel, folder: Path, settings: Settings = DEFAULT_SETTINGS):
        self.folder = folder
        self.damaged = 0
        """Files of the folder that are no sessions of this model."""
        self._trained, self._settings = trained, settings
        self._lock = RLock()
        self._infos: dict[str, dict[str, SessionInfo]] = {}  # by owner and id
        self._used = Counter[str]()  # bytes of the files of each owner
        self._awake = AwakeSessions[str](settings.memory)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path in sorted(folder.iterdir()):
            if path.suffix == SUFFIX:
                self._find(path)
            elif path.name.endswith((STAGED, ".partial")):  # of a server that was killed while it wrote
                path.unlink()

    def create(self, owner: str, session: Session, parent: str | None = None) -> SessionInfo:
        """Keep a new session."""
        with self._lock:
            infos = self._infos.get(owner, {})
            if len(infos) >= self._settings.max_sessions:
                raise QuotaReached(f"{len(infos):,} sessions are all that one key may have. Delete some.")
        return self._write(owner, secrets.token_hex(12), session, parent, time.time())

    def update(self, owner: str, name: str, session: Session) -> SessionInfo:
        """Keep what a session has become."""
        info = self.info(owner, name)
        return self._write(owner, name, session, info.parent, info.made)

    def fork(self, owner: str, name: str) -> SessionInfo:
        """Keep a second session that goes on from where one is now."""
        return self.create(owner, self.get(owner, name), parent=name)

    def upload(self, owner: str, data: bytes) -> SessionInfo:
        """Keep the session of a state file that anybody may have made, or refuse it."""
        path = self.folder / f".{secrets.token_hex(12)}{STAGED}"
        try:
            with explain_errors(path):
                path.touch(state_file.PRIVATE)
                path.write_bytes(data)
            session = self._load(path)
        except (CheckpointError, UsageError):
            raise NoState("This is no state of this model, or it is damaged. Read the text again.") from None
        finally:
            path.unlink(missing_ok=True)
        return self.create(owner, session)

    def get(self, owner: str, name: str) -> Session:
        """Return a session, woken from its file where it sleeps."""
        self.info(owner, name)
        with self._lock:
            session = self._awake.get(name)
            if session is not None:
                return session
        session = self._load(self._path(name))
        with self._lock:
            self._awake.put(name, session)
        return session

    def info(self, owner: str, name: str) -> SessionInfo:
        """Return what is known of a session of this owner; one of another, or whose file was removed, is unknown."""
        with self._lock:
            info = self._infos.get(owner, {}).get(name)
            if info is not None and not self._path(name).exists():
                self._forget(owner, name)
                info = None
        if info is None:
            raise UnknownSession(f"There is no session {name!r}.")
        return info

    def list(self, owner: str) -> list[SessionInfo]:
        """Return the sessions of an owner, the oldest first."""
        with self._lock:
            return sorted(self._infos.get(owner, {}).values(), key=lambda info: info.made)

    def delete(self, owner: str, name: str) -> None:
        self.info(owner, name)
        with self._lock:
            self._forget(owner, name)
            self._path(name).unlink(missing_ok=True)

    def file(self, owner: str, name: str) -> bytes:
        """Return the state file of a session, to be downloaded."""
        self.info(owner, name)
        return self._path(name).read_bytes()

    @property
    def count(self) -> int:
        with self._lock:
            return sum(map(len, self._infos.values()))

    @property
    def file_bytes(self) -> int:
        with self._lock:
            return self._used.total()

    @property
    def awake_bytes(self) -> int:
        return self._awake.bytes

    @torch.inference_mode()
    def _write(self, owner: str, name: str, session: Session, parent: str | None, made: float) -> SessionInfo:
        path, trained = self._path(name), self._trained
        session = session._replace(state=trained.model.settle(session.state))
        about: dict[str, Any] = {"owner": owner, "parent": parent, "made": made}
        staged = path.with_suffix(STAGED)
        state_file.save(
            staged, session, trained.model, trained.owners, trained.tokenizer, str(trained.checkpoint), about
        )
        size = staged.stat().st_size
        if self._used[owner] - self._size(owner, name) + size > self._settings.max_session_bytes:
            staged.unlink()
            raise QuotaReached(
                f"{self._settings.max_session_bytes:,} bytes of sessions are all that one key may have. Delete some."
            )
        tail = state_file.tail_of(session, trained.tokenizer)
        info = SessionInfo(name, parent, made, int(session.total), size, tail)
        with self._lock:
            staged.replace(path)
            self._note(owner, info)
            self._awake.put(name, session)
        return info

    def _forget(self, owner: str, name: str) -> None:
        self._awake.pop(name)
        self._used[owner] -= self._infos[owner].pop(name).bytes

    def _size(self, owner: str, name: str) -> int:
        """Return the bytes of a file; 0 where there is none yet."""
        info = self._infos.get(owner, {}).get(name)
        return info.bytes if info else 0

    def _note(self, owner: str, info: SessionInfo) -> None:
        self._used[owner] += info.bytes - self._size(owner, info.id)
        self._infos.setdefault(owner, {})[info.id] = info

    def _find(self, path: Path) -> None:
        """Take up the session of a file."""
        try:
            about = state_file.describe(path)
            owner, parent, made = about["owner"], about["parent"], float(about["made"])
            if any(about[key] != value for key, value in self._trained.owners.items()):
                raise CheckpointError("of another model")
        except (CheckpointError, UsageError, KeyError, TypeError, ValueError):
            self.damaged += 1
            return
        info = SessionInfo(path.stem, parent, made, about["tokens"], path.stat().st_size, about["tail"])
        self._note(owner, info)

    def _load(self, path: Path) -> Session:
        return self._trained.load_state(path)

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}{SUFFIX}"
