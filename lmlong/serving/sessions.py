"""Sessions of clients, each a file on disk; the most recently used ones are in memory too.

A session is written to its file before the client gets a response, so none is lost however the server ends. The file is
a state file with the owner of the session and the session that it was forked from.
"""

import hashlib
import json
import secrets
import time
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
from lmlong.model.learning.levels import Level
from lmlong.model.learning.state import level_of
from lmlong.serving.settings import DEFAULT_SETTINGS, Settings

SUFFIX, STAGED = ".state", ".new"
EVERYBODY = "everybody"
"""The owner of sessions made without a key."""


class UnknownSession(LmlongError):
    """There is no such session, or it belongs to another key."""


class NoState(LmlongError):
    """An upload that is not a state of this model."""


class QuotaReached(LmlongError):
    """An owner has the maximum bytes or number of sessions."""


class LearnsAlready(LmlongError):
    """A request asks a session that learns from its text not to, or to learn something else."""


class SessionInfo(NamedTuple):
    """A session as shown to its owner."""

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
    learns: Level | None
    """What it learns from its text."""


def owner_of(key: str | None) -> str:
    """Return the owner of an API key: a hash, since files must not contain the key itself."""
    return EVERYBODY if key is None else hashlib.sha256(b"lmlong session owner " + key.encode()).hexdigest()[:32]


def check_learn(session: Session, learn: Level | bool | None) -> None:
    """Refuse the `learn` of a request that continues a session: what was learned stays in its state, and is used."""
    level = level_of(session.state.learned)
    if level and learn not in (None, True, level):
        raise LearnsAlready(
            f"learn: {json.dumps(learn)}, but this session learns {json.dumps(level)} until its end. Leave learn out, "
            "or create another session."
        )


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
        self.trained, self._settings = trained, settings
        self._lock = RLock()
        self._infos: dict[str, dict[str, SessionInfo]] = {}  # by owner and id
        self._awake = AwakeSessions[str](settings.memory)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path in sorted(folder.iterdir()):
            if path.suffix == SUFFIX:
                self._find(path)
            elif path.name.endswith((STAGED, ".partial")):  # of a server that was killed while it wrote
                path.unlink()

    def create(self, owner: str, session: Session, parent: str | None = None) -> SessionInfo:
        """Save a new session."""
        with self._lock:
            infos = self._infos.get(owner, {})
            if len(infos) >= self._settings.max_sessions:
                raise QuotaReached(f"{len(infos):,} sessions are all that one key may have. Delete some.")
        return self._write(owner, secrets.token_hex(12), session, parent, time.time())

    def update(self, owner: str, name: str, session: Session) -> SessionInfo:
        info = self.info(owner, name)
        return self._write(owner, name, session, info.parent, info.made)

    def fork(self, owner: str, name: str) -> SessionInfo:
        """Save a copy of a session as a new one."""
        return self.create(owner, self.get(owner, name), parent=name)

    def upload(self, owner: str, data: bytes, learn: Level | bool | None = None) -> SessionInfo:
        """Save the session of a state file, which may be hostile. `learn` works as in `load_state`."""
        path = self.folder / f".{secrets.token_hex(12)}{STAGED}"
        try:
            with explain_errors(path):
                path.touch(state_file.PRIVATE)
                path.write_bytes(data)
            session = self.trained.load_state(path, learn)
            check_learn(session, learn)
        except (CheckpointError, UsageError):
            raise NoState("This is not a state of this model, or it is damaged. Read the text again.") from None
        finally:
            path.unlink(missing_ok=True)
        return self.create(owner, session)

    def get(self, owner: str, name: str) -> Session:
        """Return a session from memory, or from its file."""
        self.info(owner, name)
        with self._lock:
            session = self._awake.get(name)
            if session is not None:
                return session
        session = self.trained.load_state(self._path(name), learn=False)
        with self._lock:
            self._awake.put(name, session)
        return session

    def info(self, owner: str, name: str) -> SessionInfo:
        """Return a session's info. A session of another owner, or whose file was removed, is unknown."""
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
        self.info(owner, name)
        return self._path(name).read_bytes()

    @property
    def count(self) -> int:
        with self._lock:
            return sum(map(len, self._infos.values()))

    @property
    def file_bytes(self) -> int:
        with self._lock:
            return sum(info.bytes for infos in self._infos.values() for info in infos.values())

    @property
    def awake_bytes(self) -> int:
        return self._awake.bytes

    @torch.inference_mode()
    def _write(self, owner: str, name: str, session: Session, parent: str | None, made: float) -> SessionInfo:
        path, trained = self._path(name), self.trained
        session = session._replace(state=trained.model.settle(session.state))
        learns = level_of(session.state.learned)
        about: dict[str, Any] = {"owner": owner, "parent": parent, "made": made, "learns": learns}
        staged = path.with_suffix(STAGED)
        state_file.save(
            staged, session, trained.model, trained.owners, trained.tokenizer, str(trained.checkpoint), about
        )
        size = staged.stat().st_size
        others = sum(info.bytes for info in self.list(owner) if info.id != name)
        if others + size > self._settings.max_session_bytes:
            staged.unlink()
            raise QuotaReached(
                f"{self._settings.max_session_bytes:,} bytes of sessions are all that one key may have. Delete some."
            )
        tail = state_file.tail_of(session, trained.tokenizer)
        info = SessionInfo(name, parent, made, int(session.total), size, tail, learns)
        with self._lock:
            staged.replace(path)
            self._infos.setdefault(owner, {})[name] = info
            self._awake.put(name, session)
        return info

    def _forget(self, owner: str, name: str) -> None:
        self._awake.pop(name)
        del self._infos[owner][name]

    def _find(self, path: Path) -> None:
        """Add the session in a file, unless it is damaged or of another model."""
        try:
            about = state_file.describe(path)
            owner, parent, made = about["owner"], about["parent"], float(about["made"])
            if any(about[key] != value for key, value in self.trained.owners.items()):
                raise CheckpointError("of another model")
        except (CheckpointError, UsageError, KeyError, TypeError, ValueError):
            return
        size, learns = path.stat().st_size, about.get("learns")  # not in files from before sessions could learn
        info = SessionInfo(path.stem, parent, made, about["tokens"], size, about["tail"], learns)
        self._infos.setdefault(owner, {})[info.id] = info

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}{SUFFIX}"
