"""The sessions of a server: a session is its tokens, and its state is a cache.

request -> text -> tokens -> pieces -> state after each, by the key of the pieces so far     (writer, state_table)
a new text starts from the longest beginning whose state is known, a session from its own
turn: the pieces of the prompt, those of the answer, the unread text at the end              (request)
the pieces of the answer are read again, since a state is what reading its pieces gives
the turn becomes a line of the session's file, flushed before the client gets a response     (session_file)
the state goes into the table, and to disk if PIECE tokens were read since the last there
a state that is gone is read again, from the pieces after the nearest known one
"""

import secrets
import time
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from lmlong.errors import CheckpointError, UsageError
from lmlong.inference import state_file
from lmlong.inference.loading import TrainedLanguageModel
from lmlong.inference.session import begin_learning
from lmlong.inference.state_file import TAIL
from lmlong.inference.state_table import PIECE, Piece, Place, StateTable, superseded
from lmlong.inference.unread import UnreadText
from lmlong.io.files import fsync
from lmlong.io.system_errors import explain_errors
from lmlong.model.sampling_options import RECENT
from lmlong.model.state import state_bytes
from lmlong.serving.api_errors import ApiError
from lmlong.serving.request import Turn
from lmlong.serving.session_file import FORMAT, Header, Line, SessionFile, SessionInfo
from lmlong.serving.session_folder import SessionFolder
from lmlong.serving.session_text import OwnText
from lmlong.serving.settings import DEFAULT_SETTINGS, Settings

STATES = "states"
"""The folder of states that can be read again."""

UNSAVED = 32
"""Tokens of a long session for each that may have to be read again, because no state after it is on disk."""

APART = 1024
"""Tokens that are read in about a second: of the states of a session on disk, all but the newest lie as far apart."""

BEGINNING = 80
"""Characters of a turn that its info has."""


def check_learn(learns: bool, learn: bool | None) -> None:
    """Refuse the `learn` of a request that continues a session: what was learned stays in its state, and is used."""
    if learns and learn is False:
        message = "learn: false, but this session learns until its end. Leave learn out, or create another session."
        raise ApiError(400, message, "learn", "invalid_value")


class SessionStore:
    """Saves turns of sessions, and returns the places where sessions continue. One thread at a time may do so; any
    thread may ask what there is."""

    def __init__(self, trained: TrainedLanguageModel, folder: Path, settings: Settings = DEFAULT_SETTINGS):
        self.trained = trained
        self.states = StateTable(trained, settings.memory, folder / STATES, settings.disk)
        self.folder = SessionFolder(folder, trained.owners, settings, self.states)

    def save(self, turn: Turn, to: str | Header | None = None) -> SessionInfo:
        """Append a turn to a session, or save it as a new one, which may be the `branch` of another."""
        file = self.folder.get(to) if isinstance(to, str) else None
        place, line = self._after(turn)
        if file is not None:
            self.folder.append(file, line)
        else:
            file = self.folder.create(to if isinstance(to, Header) else self._header(), line)
        self._keep(file, place)
        return self._info(file)

    def branch(self, name: str) -> Header:
        """Return the header of a session that begins where this one ends now."""
        file = self.folder.get(name)
        return self._header(parent=name, length=len(file.pieces()), repeated=len(self._unread(file).pending))

    def fork(self, name: str) -> SessionInfo:
        """Save a copy of a session as a new one."""
        file = self.folder.get(name)
        new = {"pieces": [], "tail": self._end(file.last), "before": "", "at": time.time()}
        fork = self.folder.create(self.branch(name), file.last.model_copy(update=new))
        fork.key = file.key
        return self._info(fork)

    def upload(self, data: bytes, learn: bool | None = None) -> SessionInfo:
        """Save the session of a state file, which may be hostile. `learn` works as in `load_state`."""
        self.folder.check_quota(len(data))
        header = self._header(root=True)
        path = self.folder.path / f"{header.id}.root"
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
            place = Place(self.folder.first_key(header), session)
            place, line = self._after(Turn(place, (), unread=session.unread, learn=learns))
            file = self.folder.create(header.model_copy(update={"repeated": len(session.unread.pending)}), line)
        except BaseException as error:
            path.unlink(missing_ok=True)
            if isinstance(error, CheckpointError | UsageError):
                message = "This is not a state of this model, or it is damaged. Read the text again."
                raise ApiError(400, message, code="invalid_state") from None
            raise
        self._keep(file, place)
        return self._info(file)

    def start(self, name: str, fork: bool) -> Iterator[tuple[Place, bool, Header | None] | None]:
        """Yield the place where a session ends, whether it learns, and with `fork` the header of a new one there."""
        file = self.folder.get(name)
        learns, header = file.last.learns, self.branch(name) if fork else None
        yield (yield from self._end_of(file)), learns, header

    def info(self, name: str) -> SessionInfo:
        """Return a session's info."""
        return self._info(self.folder.get(name))

    def page(self, most: int, after: str | None = None) -> tuple[Sequence[SessionInfo], str | None]:
        """Return a page of the infos of sessions, and where the rest begins, as `SessionFolder.page` does."""
        files, rest = self.folder.page(most, after)
        return [self._info(file) for file in files], rest

    def text(self, name: str, likelihoods: bool) -> Iterator[OwnText | None]:
        """Yield the text that a session adds to its parent's, and with `likelihoods` what they are computed from."""
        file = self.folder.get(name)
        start, pieces, inherited = self._pieces(file)
        unread = self._unread(file)
        before = self._end(file.lines()[0]) if file.header.root else ""
        authors = [piece.kind == "wrote" for piece in pieces[inherited:]] + [bool(unread.chosen)]
        first = None
        if likelihoods and True in authors:
            first = yield from self._after_pieces(start, pieces[: inherited + authors.index(True)])
        yield OwnText(before, file.header.repeated, pieces[inherited:], unread, first)

    def download(self, name: str) -> Iterator[bytes | None]:
        """Yield a session as a state file."""
        file = self.folder.get(name)
        learns, (_, session) = file.last.learns, (yield from self._end_of(file))
        assert session is not None
        with TemporaryDirectory(prefix="lmlong-") as folder:
            self.trained.save_state(begin_learning(self.trained.model, session, learns), Path(folder, "state"))
            yield Path(folder, "state").read_bytes()

    def _after(self, turn: Turn) -> tuple[Place, Line]:
        """Return the place after a turn, and the line of the turn."""
        trained, unread = self.trained, turn.unread
        place = turn.read.after(trained.model, turn.written)
        session = place.session
        assert session is not None
        whole = session._replace(unread=unread)
        line = Line(
            pieces=[(piece.kind, [*piece.tokens]) for piece in (*turn.prompt, *turn.written)],
            unread=(unread.before.decode("latin-1"), unread.pending.decode("latin-1"), [*unread.chosen]),
            options={**turn.options},
            at=round(time.time(), 3),
            tokens=place.tokens,
            state_bytes=state_bytes(begin_learning(trained.model, whole, turn.learn)),
            learns=turn.learn,
        )
        own, tail = self._end(line), state_file.tail_of(whole, trained.tokenizer).encode("utf-8", "replace").decode()
        end = {"before": tail.removesuffix(own)} if tail.endswith(own) else {"tail": tail}
        return place, line.model_copy(update=end)

    def _header(self, **about: Any) -> Header:
        """Return the header of a new session."""
        name, run, owners = secrets.token_hex(12), str(self.trained.checkpoint), self.trained.owners
        return Header(lmlong="session", format=FORMAT, id=name, made=time.time(), run=run, owners=owners, **about)

    def _keep(self, file: SessionFile, place: Place) -> None:
        """Keep the state of a session, on disk too if many tokens would have to be read again."""
        file.key = place.key
        self.states.put(place)
        if place.tokens - file.saved >= max(PIECE, place.tokens // UNSAVED):
            file.saved = place.tokens
            self.states.save(place)
            saved = {tokens: key for key, tokens in self.folder.own_places(file) if key in self.states.files}
            for tokens in superseded(saved, max(saved, default=0), APART):
                self.states.remove(saved[tokens])

    def _info(self, file: SessionFile) -> SessionInfo:
        """Return a session's info, with the beginning of its last turn."""
        _, pending, chosen = file.last.unread
        texts, repeated = {"wrote": b"", "read": b""}, file.header.repeated
        for kind, tokens in [*file.last.pieces, ("wrote", chosen)]:
            by = "wrote" if kind == "wrote" else "read"
            if len(texts[by]) < BEGINNING:
                text = self._text(tokens[:BEGINNING])
                texts[by] += text[repeated:]
                repeated = max(0, repeated - len(text))
        if not chosen:
            texts["read"] += pending.encode("latin-1", "replace")[repeated:]
        given, written = (texts[by].decode(errors="replace")[:BEGINNING] for by in ("read", "wrote"))
        header, last = file.header, file.last
        about = int(header.made), last.tokens, file.bytes, last.state_bytes, last.learns, given, written
        return SessionInfo(header.id, "session", header.parent, *about, self._end(last))

    def _end(self, line: Line) -> str:
        """Return the end of the text after a turn."""
        tokens = [token for _, tokens in line.pieces for token in tokens][-RECENT:]
        data = self._text(tokens) + line.unread[1].encode("latin-1", "replace")
        return line.tail or line.before + data.decode(errors="replace")[-TAIL:]

    def _text(self, tokens: Sequence[int]) -> bytes:
        """Return the text of tokens of a file, which may not be of the model."""
        most = self.trained.model.embedding.num_embeddings
        return self.trained.tokenizer.decode_bytes([token for token in tokens if token < most])

    def _unread(self, file: SessionFile) -> UnreadText:
        """Return the unread text at the end of a session."""
        try:
            before, pending, chosen = file.last.unread
            unread = UnreadText(before.encode("latin-1"), pending.encode("latin-1"), tuple(chosen))
            state_file.check_unread(unread, self.trained.tokenizer)
        except (ValueError, IndexError) as error:
            raise file.damaged(str(error)) from None
        return unread

    def _pieces(self, file: SessionFile) -> tuple[Place, Sequence[Piece], int]:
        """Return the place where the text of a session begins, its pieces, and how many of them are its parent's."""
        first, pieces, inherited = self.folder.pieces(file)
        if any(max(piece.tokens) >= self.trained.model.embedding.num_embeddings for piece in pieces):
            raise file.damaged("it has tokens that the model does not have")
        return self._start(first), pieces, inherited

    def _after_pieces(self, start: Place, pieces: Sequence[Piece]) -> Generator[None, None, Place]:
        """Return the place after pieces; yield before each that is read, since no state after it is known."""
        place, known = self.states.nearest(start, pieces)
        for piece in pieces[known:]:
            yield
            place = place.after(self.trained.model, [piece])
        return place

    def _end_of(self, file: SessionFile) -> Generator[None, None, Place]:
        """Return the place where a session ends, as `_after_pieces` does."""
        file.check()
        last, unread, place = file.last, self._unread(file), Place(file.key, self.states.get(file.key))
        if place.session is None:
            start, pieces, _ = self._pieces(file)
            place = yield from self._after_pieces(start, pieces)
            if place.session is None or place.tokens != last.tokens:
                raise file.damaged("it has other tokens than it says")
            if file.last is last:  # no turn was saved meanwhile
                self._keep(self.folder.get(file.header.id), place)
        return place._replace(session=place.session._replace(unread=unread))

    def _start(self, file: SessionFile) -> Place:
        """Return the place before the first token of a file: that of its uploaded state, if any."""
        if not file.header.root:
            return Place(self.folder.first_key(file.header))
        try:
            session = self.trained.load_state(file.root, learn=False)
        except (CheckpointError, UsageError):
            raise file.damaged("the uploaded state that it begins with is missing or damaged") from None
        return Place(self.folder.first_key(file.header), session._replace(unread=UnreadText()))
