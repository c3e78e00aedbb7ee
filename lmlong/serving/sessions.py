"""The sessions of a server: a session is its tokens, and its state is a cache.

request -> text -> tokens -> pieces -> state after each, by the key of the pieces so far     (writer, state_table)
a new text starts from the longest beginning whose state is known, a session from its own
turn: the pieces of the prompt, those of the answer, the unread text at the end              (request)
the pieces of the answer are read again, since a state is what reading its pieces gives
the turn becomes a line of the session's file, flushed before the client gets a response     (session_file)
the state goes into the table, and to disk if PIECE tokens were read since the last there
a state that is gone is read again, from the pieces after the nearest known one
fork: a new file that names its parent and how many of the parent's pieces it begins with
upload: a state in roots/, without tokens, which the files that begin with it name
delete: the file, or while forks need it a last line that says so; then the roots that no file names
"""

import hashlib
import re
import secrets
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import RLock
from typing import Any

from lmlong.errors import CheckpointError, LmlongError, UsageError
from lmlong.inference import state_file
from lmlong.inference.loading import TrainedLanguageModel
from lmlong.inference.session import begin_learning, with_unread
from lmlong.inference.state_table import KEY_BYTES, PIECE, Piece, Place, StateTable, superseded
from lmlong.inference.unread import UnreadText
from lmlong.io.files import fsync
from lmlong.io.lock import Held, lock
from lmlong.io.system_errors import explain_errors
from lmlong.model.state import state_bytes
from lmlong.serving.request import Turn
from lmlong.serving.scheduler import Closed
from lmlong.serving.session_file import (
    FORMAT,
    NAME,
    ROOT,
    Header,
    Line,
    SessionFile,
    SessionInfo,
    reason,
    unread_fields,
)
from lmlong.serving.session_text import OwnText
from lmlong.serving.settings import DEFAULT_SETTINGS, Settings

STATES = "states"
"""The folder of states that can be read again."""

UNSAVED = 32
"""Tokens of a long session for each that may have to be read again, because no state after it is on disk."""

BEGINNING = 80
"""Characters of a turn that its info has."""

EARLIER = re.compile(r"[0-9a-f]{24}(\.state|-[0-9a-f]{16}\.base)")
"""The names of files of sessions of earlier versions."""


class UnknownSession(LmlongError):
    """The requested session does not exist."""


class NoState(LmlongError):
    """An upload that is not a state of this model."""


class QuotaReached(LmlongError):
    """There is the maximum number of sessions, or of their bytes."""


class LearnsAlready(LmlongError):
    """A request asks a session that learns from its text not to."""


def check_learn(learns: bool, learn: bool | None) -> None:
    """Refuse the `learn` of a request that continues a session: what was learned stays in its state, and is used."""
    if learns and learn is False:
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


class SessionStore:
    """The sessions of a server. One thread at a time may change them; any thread may ask what there is."""

    def __init__(self, trained: TrainedLanguageModel, folder: Path, settings: Settings = DEFAULT_SETTINGS):
        self.folder, self.trained, self.file_bytes = folder, trained, 0
        self.states = StateTable(trained, settings.memory, folder / STATES, settings.disk)
        self.closing = False
        """Whether to stop reading texts again."""
        self._settings = settings
        self._lock = RLock()
        self._files: dict[str, SessionFile] = {}  # by id; also deleted ones that forks need, and those of other models
        self._listed = set[str]()
        self._forks = Counter[str]()  # by id
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._find()

    def create(self, turn: Turn) -> SessionInfo:
        """Save a new session."""
        place, line = self._after(turn)
        return self._create(self._header(secrets.token_hex(12)), line, place)

    def branch(self, name: str) -> Header:
        """Return the header of a session that begins where this one ends now."""
        file = self._file(name)
        repeated = len(self._unread(file).pending)
        return self._header(secrets.token_hex(12), parent=name, length=len(file.pieces()), repeated=repeated)

    def create_branch(self, header: Header, turn: Turn) -> SessionInfo:
        """Save a new session with a header of `branch`."""
        assert header.parent is not None
        self._file(header.parent)
        place, line = self._after(turn)
        return self._create(header, line, place)

    def update(self, name: str, turn: Turn) -> SessionInfo:
        """Append a turn to a session."""
        file = self._file(name)
        place, line = self._after(turn)
        self._check_quota(len(line.line()))
        self._append(file, line)
        file.unsaved += sum(len(piece.tokens) for piece in (*turn.prompt, *turn.written))
        self._keep(file, place)
        return self._info(file)

    def fork(self, name: str) -> SessionInfo:
        """Save a copy of a session as a new one."""
        file, header = self._file(name), self.branch(name)
        info = self._create(header, file.last.model_copy(update={"pieces": [], "at": time.time()}))
        fork = self._files[info.id]
        fork.key, fork.unsaved = file.key, file.unsaved
        return info

    def upload(self, data: bytes, learn: bool | None = None) -> SessionInfo:
        """Save the session of a state file, which may be hostile. `learn` works as in `load_state`."""
        self._check_quota(len(data))
        name = secrets.token_hex(12)
        path = self.folder / f"{name}.root"
        try:
            if not state_file.is_state(data):
                raise UsageError
            with explain_errors(path):
                path.touch(state_file.PRIVATE)
                path.write_bytes(data)
                fsync(path)
            session = self.trained.load_state(path, learn=False)
            check_learn(session.state.learned is not None, learn)
            learns = session.state.learned is not None or self.trained.learns(learn)
            place = Place(self._root_key(name), session)
            _, line = self._after(Turn(place, (), unread=session.unread.row(0), learn=learns))
            repeated = len(session.unread.row(0).pending)
            return self._create(self._header(name, root=True, repeated=repeated), line, place)
        except BaseException as error:
            path.unlink(missing_ok=True)
            if isinstance(error, CheckpointError | UsageError):
                message = "This is not a state of this model, or it is damaged. Read the text again."
                raise NoState(message) from None
            raise

    def get(self, name: str) -> Place:
        """Return the place where a session ends."""
        file = self._file(name)
        file.check()
        session = self.states.get(file.key) if file.key else None
        place = Place(file.key, session) if file.key and session else self._read_again(file)
        assert place.session is not None
        return Place(place.key, with_unread(place.session, self._unread(file)))

    def info(self, name: str) -> SessionInfo:
        """Return a session's info. A session whose file was removed is unknown."""
        return self._info(self._file(name))

    def text(self, name: str, likelihoods: bool) -> OwnText:
        """Return the text that a session adds to its parent's, and with `likelihoods` what they are computed from."""
        file = self._file(name)
        start, pieces, inherited = self._pieces(file)
        unread = self._unread(file)
        before = file.lines()[0].tail if file.header.root else ""
        authors = [piece.kind == "wrote" for piece in pieces[inherited:]] + [bool(unread.chosen)]
        first = None
        if likelihoods and True in authors:
            first, _ = self._after_pieces(start, pieces[: inherited + authors.index(True)])
        return OwnText(before, file.header.repeated, pieces[inherited:], unread, first)

    def list(self) -> list[SessionInfo]:
        """Return the sessions, the oldest first."""
        return [*self.page(sys.maxsize)[0]]

    def page(self, most: int, after: str | None = None) -> tuple[Sequence[SessionInfo], str | None]:
        """Return up to `most` sessions, the oldest first, after those that earlier pages had; and where the rest
        begins, if there is more."""
        with self._lock:
            files = sorted((self._files[name] for name in self._listed), key=lambda file: file.info.cursor)
        if after is not None:
            files = [file for file in files if file.info.cursor > after]
        return [self._info(file) for file in files[:most]], files[most - 1].info.cursor if len(files) > most else None

    def delete(self, name: str) -> None:
        """Delete a session. Its file remains while forks need it."""
        file = self._file(name)
        for key in file.saved.values():
            self.states.forget(key)
            self.states.remove(key)
        if self._forks[name]:
            self._append(file, file.last.model_copy(update={"pieces": [], "deleted": True}))
        self._forget(name)

    def download(self, name: str) -> bytes:
        """Return a session as a state file."""
        file, session = self._file(name), self.get(name).session
        assert session is not None
        learning = begin_learning(self.trained.model, session, file.last.learns)
        with TemporaryDirectory(prefix="lmlong-") as folder:
            self.trained.save_state(learning, Path(folder, "state"))
            return Path(folder, "state").read_bytes()

    @property
    def count(self) -> int:
        with self._lock:
            return len(self._listed)

    def _file(self, name: str) -> SessionFile:
        with self._lock:
            if name in self._listed and not self._files[name].path.exists():
                self._forget(name)
            if name not in self._listed:
                raise UnknownSession(f"There is no session {name!r}.")
            return self._files[name]

    def _after(self, turn: Turn) -> tuple[Place, Line]:
        """Return the place after a turn, and the line of the turn."""
        trained = self.trained
        place = turn.read.after(trained.model, turn.written)
        session = place.session
        assert session is not None
        whole = with_unread(session, turn.unread)
        line = Line(
            pieces=[(piece.kind, [*piece.tokens]) for piece in (*turn.prompt, *turn.written)],
            unread=unread_fields(turn.unread),
            options={**turn.options},
            at=time.time(),
            tokens=place.tokens,
            state_bytes=state_bytes(begin_learning(trained.model, whole, turn.learn)),
            learns=turn.learn,
            tail=state_file.tail_of(whole, trained.tokenizer).encode("utf-8", "replace").decode(),
        )
        return place, line

    def _header(self, name: str, **about: Any) -> Header:
        run, owners = str(self.trained.checkpoint), self.trained.owners
        return Header(lmlong="session", format=FORMAT, id=name, made=time.time(), run=run, owners=owners, **about)

    def _create(self, header: Header, line: Line, place: Place | None = None) -> SessionInfo:
        """Write the file of a new session, and keep its state if that is given."""
        if self.count >= self._settings.max_sessions:
            raise QuotaReached(f"{self.count:,} sessions are all that this server keeps. Delete some.")
        self._check_quota(len(header.line()) + len(line.line()))
        with explain_errors(self.folder):
            file = SessionFile.create(self.folder, header, line)
        self._add(file)
        if place is not None:
            file.unsaved = 0 if header.root else place.tokens
            self._keep(file, place)
        with self._lock:
            self._listed.add(header.id)
        return self._info(file)

    def _append(self, file: SessionFile, line: Line) -> None:
        before = file.bytes
        with explain_errors(file.path):
            file.append(line)
        self.file_bytes += file.bytes - before

    def _check_quota(self, more: int) -> None:
        most = self._settings.max_session_bytes
        if self.file_bytes + more > most:
            raise QuotaReached(f"{most:,} bytes of sessions are all that this server keeps. Delete some.")

    def _keep(self, file: SessionFile, place: Place) -> None:
        """Keep the state of a session, on disk too if many tokens would have to be read again."""
        file.key = place.key
        self.states.put(place)
        if file.unsaved >= max(PIECE, place.tokens // UNSAVED):
            self.states.save(place)
            file.unsaved, file.saved[place.tokens] = 0, place.key
            for tokens in superseded(file.saved, place.tokens):
                self.states.remove(file.saved.pop(tokens))

    def _info(self, file: SessionFile) -> SessionInfo:
        """Return a session's info, with the beginning of its last turn."""
        _, pending, chosen = file.last.unread
        texts, repeated = {"wrote": b"", "read": b""}, file.header.repeated
        for kind, tokens in [*file.last.pieces, ("wrote", chosen)]:
            by = "wrote" if kind == "wrote" else "read"
            if len(texts[by]) < BEGINNING:
                known = [token for token in tokens[:BEGINNING] if token < self.trained.model.embedding.num_embeddings]
                text = self.trained.tokenizer.decode_bytes(known)
                texts[by] += text[repeated:]
                repeated = max(0, repeated - len(text))
        if not chosen:
            texts["read"] += pending.encode("latin-1", "replace")[repeated:]
        given, written = (texts[by].decode(errors="replace")[:BEGINNING] for by in ("read", "wrote"))
        return file.info._replace(given=given, written=written)

    def _unread(self, file: SessionFile) -> UnreadText:
        """Return the unread text at the end of a session."""
        try:
            unread = file.last.unread_text
            state_file.check_unread(unread, self.trained.tokenizer)
        except (ValueError, IndexError) as error:
            raise file.damaged(str(error)) from None
        return unread

    def _pieces(self, file: SessionFile) -> tuple[Place, Sequence[Piece], int]:
        """Return the place where the text of a session begins, its pieces, and how many of them are its parent's."""
        files, parts = [file], [file.pieces()]
        while (parent := files[-1].header.parent) is not None:
            files.append(self._files[parent])
            inherited, length = files[-1].pieces(), files[-2].header.length
            if len(inherited) < length:
                raise file.damaged("a session that it begins with has fewer pieces than it says")
            parts.append(inherited[:length])
        own, pieces = len(parts[0]), [piece for part in reversed(parts) for piece in part]
        if any(max(piece.tokens) >= self.trained.model.embedding.num_embeddings for piece in pieces):
            raise file.damaged("it has tokens that the model does not have")
        return self._start(files[-1]), pieces, len(pieces) - own

    def _after_pieces(self, start: Place, pieces: Sequence[Piece]) -> tuple[Place, int]:
        """Return the place after pieces, and the number of tokens that were read after the nearest known state."""
        place, known = self.states.nearest(start, pieces)
        for piece in pieces[known:]:
            if self.closing:
                raise Closed("The server is shutting down.")
            place = place.after(self.trained.model, [piece])
        return place, sum(len(piece.tokens) for piece in pieces[known:])

    def _read_again(self, file: SessionFile) -> Place:
        """Return the place after the pieces of a session, of which those after the nearest known state are read."""
        start, pieces, _ = self._pieces(file)
        place, read = self._after_pieces(start, pieces)
        if place.tokens != file.last.tokens:
            raise file.damaged("it has other tokens than it says")
        file.unsaved = read
        self._keep(file, place)
        return place

    def _start(self, file: SessionFile) -> Place:
        """Return the place before the first token of a file: that of its uploaded state, if any."""
        if not file.header.root:
            return Place(self.states.empty)
        try:
            session = self.trained.load_state(file.root, learn=False)
        except (CheckpointError, UsageError):
            raise file.damaged("the uploaded state that it begins with is missing or damaged") from None
        return Place(self._root_key(file.header.id), with_unread(session, UnreadText()))

    def _root_key(self, name: str) -> bytes:
        """Return the key of the uploaded state of a session."""
        return hashlib.blake2b(self.states.empty + name.encode(), digest_size=KEY_BYTES).digest()

    def _add(self, file: SessionFile) -> None:
        with self._lock:
            self._files[file.header.id] = file
            self._forks.update(filter(None, [file.header.parent]))
            self.file_bytes += file.all_bytes

    def _forget(self, name: str) -> None:
        """Take a session off the list, and delete all files that no session needs any more."""
        with self._lock:
            self._listed.discard(name)
            unused: str | None = name
            while unused is not None and not self._forks[unused]:
                file = self._files.pop(unused)
                self.file_bytes -= file.all_bytes
                file.path.unlink(missing_ok=True)
                if file.header.root:
                    state_file.delete(file.root)
                self._forks.subtract(filter(None, [file.header.parent]))
                above = self._files.get(file.header.parent or "")
                unused = above.header.id if above is not None and above.last.deleted else None

    def _find(self) -> None:
        """Read what is in the folder. Damaged files are reported; these and those of other models are left alone."""
        skipped = 0
        for path in sorted(self.folder.iterdir()):
            if EARLIER.fullmatch(path.name):
                remedy = "Name another folder by --sessions, or rename this one."
                raise UsageError(f"{self.folder}: its sessions are of an earlier version of lmlong. {remedy}")
            if NAME.fullmatch(path.name):
                try:
                    if file := SessionFile.open(path):
                        self._add(file)
                except (OSError, ValueError) as error:
                    skipped += self._skip(path, reason(error))
        for path in self.folder.glob("*.root"):  # those of uploads that were not completed
            if ROOT.fullmatch(path.name) and not path.with_suffix(".session").exists():
                state_file.delete(path)
        whole = self._whole()
        for name, file in self._files.items():
            if name not in whole:
                skipped += self._skip(file.path, "a session that it begins with is missing")
            elif file.header.owners == self.trained.owners and not file.last.deleted:
                self._listed.add(name)
        for file in [] if skipped else [*self._files.values()]:
            if file.last.deleted and file.header.id in self._files:
                self._forget(file.header.id)

    def _skip(self, path: Path, why: str) -> bool:
        print(f"skipped {path}: {why}", file=sys.stderr)
        return True

    def _whole(self) -> set[str]:
        """Return the sessions whose parents, and the parents of these, are all there."""
        whole = dict[str | None, bool]({None: True})
        for name in self._files:
            way = dict[str | None, None]()
            above: str | None = name
            while above in self._files and above not in whole and above not in way:
                way[above] = None
                above = self._files[above].header.parent
            whole |= dict.fromkeys(way, whole.get(above, False))
        return {name for name, is_whole in whole.items() if name is not None and is_whole}
