"""Short turns that are stored as tokens: equal to the last bit after a restart, and refused where they are damaged."""

from pathlib import Path
from typing import Any

import pytest
import torch
from serving.engines import loaded
from serving.test_session_folder import BOOK, TURNS, grown, is_equal, opened, rewritten, size

from lmlong.errors import CheckpointError
from lmlong.inference import session_file
from lmlong.inference.loading import TrainedLanguageModel
from lmlong.inference.session import Session, greedy, with_unread
from lmlong.inference.unread import UnreadText
from lmlong.recipe import Attention, Ngram
from lmlong.serving.sessions import SessionStore


@pytest.fixture(scope="module", params=[False, True], ids=["torch", "native"])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TrainedLanguageModel:
    attention = Attention(kind=["linear", "ngram", "window"], window=8, ngram=Ngram(sizes=[2, 4], buckets=1500))
    return loaded(tmp_path_factory.mktemp("model") / "run", native=request.param, attention=attention)


def written(trained: TrainedLanguageModel, text: str, session: Session) -> Session:
    """A turn whose answer was generated step by step, and so rounded in another way than what is read at once."""
    return greedy(trained.model, trained.read(text, session), 5)


def turns(trained: TrainedLanguageModel, store: SessionStore, texts: list[str]) -> dict[str, Session]:
    """Return a book, and turns that each continue the one before, as the store has them."""
    name = store.create(trained.read(BOOK)).id
    found = {name: store.get(name)}
    for text in texts:
        before = found[name]
        name = store.create(written(trained, text, before), name, before).id
        found[name] = store.get(name)
    return found


@pytest.mark.parametrize("most", [256, 40])
def test_turns_are_equal_to_the_last_bit_after_a_restart(
    trained: TrainedLanguageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    monkeypatch.setattr(session_file, "MOST_READ", most)
    store = opened(trained, tmp_path)
    sessions = turns(trained, store, TURNS * 3)
    files = {name: store._files.live[name] for name in sessions}
    tokens = [len(file.file.pieces or ()) for file in files.values()]
    states = [name for name, file in files.items() if file.file.pieces is None]
    assert tokens[:4] == [0, 1, 2, 3] and len(states) == 1 if most == 256 else 3 <= len(states) <= 9
    assert all(file.base is None or file.base.file.pieces is None for file in files.values())
    assert all(file.bytes < 2500 for name, file in files.items() if name not in states)
    assert store.file_bytes == size(tmp_path)
    again = opened(trained, tmp_path)
    for name, session in reversed(sessions.items()):
        assert is_equal(again.get(name), session)
    for name in list(sessions)[:-1]:
        again.delete(name)
    assert is_equal(opened(trained, tmp_path).get([*sessions][-1]), [*sessions.values()][-1])
    again.delete([*sessions][-1])
    assert list(tmp_path.iterdir()) == []


def test_a_turn_continues_as_it_was_written(trained: TrainedLanguageModel, tmp_path: Path) -> None:
    """Its state is another one by rounding only."""
    store = opened(trained, tmp_path)
    book, *_ = turns(trained, store, []).items()
    session = written(trained, "abc", book[1])
    stored = store.get(store.create(session, book[0], book[1]).id)
    assert torch.equal(stored.recent, session.recent) and torch.equal(stored.total, session.total)
    for x, y in zip(
        stored.state.blocks[0].attention, trained.model.settle(session.state).blocks[0].attention, strict=True
    ):
        assert (x - y).norm() <= 1e-5 * y.norm()
    one, other = (greedy(trained.model, each, 20).recent for each in (stored, session))
    assert torch.equal(one, other)


def test_a_session_that_grows_keeps_two_bases(
    trained: TrainedLanguageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_file, "MOST_READ", 20)
    store = opened(trained, tmp_path)
    name = store.create(trained.read(BOOK)).id
    kinds = []
    for text in TURNS * 2:
        store.update(name, written(trained, text, store.get(name)))
        kinds.append(store._files.live[name].file.pieces is None)
        assert len(list(tmp_path.iterdir())) <= 3 and store.file_bytes == size(tmp_path)
        assert is_equal(opened(trained, tmp_path).get(name), store.get(name))
    assert True in kinds and False in kinds


def test_unread_text_is_kept_and_a_fork_has_no_tokens(trained: TrainedLanguageModel, tmp_path: Path) -> None:
    store = opened(trained, tmp_path)
    (name, book), *_ = turns(trained, store, []).items()
    for text in (UnreadText(b"a", b"bc", tuple(trained.tokenizer.encode("bc"))), UnreadText(b"", b"d"), UnreadText()):
        changed = with_unread(trained.read("ab", book), text)
        name = store.create(changed, name, book).id
        book = store.get(name)
        assert book.unread.row(0) == text and is_equal(opened(trained, tmp_path).get(name), book)
    fork = store.fork(name).id
    assert store._files.live[fork].file.pieces == store._files.live[name].file.pieces
    assert is_equal(opened(trained, tmp_path).get(fork), store.get(name))


def test_what_is_no_short_turn_is_stored_as_a_state(trained: TrainedLanguageModel, tmp_path: Path) -> None:
    store = opened(trained, tmp_path)
    (name, book), *_ = turns(trained, store, []).items()
    other = trained.read(BOOK[:-1] + "a" + "bc" if BOOK[-1] != "a" else BOOK[:-1] + "bbc")  # another text, as long
    learning = trained.read("abc", None, learn=True)
    begun = store.create(learning).id
    for session, base, before in (
        (trained.read("abcd" * 100, book), name, book),
        (other, name, book),
        (trained.read("abc", store.get(begun)), begun, store.get(begun)),
    ):
        made = store.create(session, base, before).id
        assert store._files.live[made].file.pieces is None
        assert is_equal(opened(trained, tmp_path).get(made), session)


def test_a_session_is_stored_whole_where_its_base_was_removed(
    trained: TrainedLanguageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_file, "MOST_READ", 20)
    store = opened(trained, tmp_path)
    book, turn = turns(trained, store, TURNS[:1]).items()
    (tmp_path / f"{book[0]}.state").unlink()
    session = trained.read("abcd" * 6, turn[1])
    name = store.create(session, turn[0], turn[1]).id
    assert store._files.live[name].base is None
    assert is_equal(opened(trained, tmp_path).get(name), session)


def test_a_fork_of_what_a_session_was_does_not_follow_what_it_has_become(
    trained: TrainedLanguageModel, tmp_path: Path
) -> None:
    store = opened(trained, tmp_path)
    (name, book), *_ = turns(trained, store, []).items()
    store.update(name, written(trained, "abc", book), book)
    fork = store.create(trained.read("dd", book), name, book).id
    assert store._files.live[fork].base is None
    assert is_equal(opened(trained, tmp_path).get(fork), trained.read("dd", book))


@pytest.mark.parametrize(
    "pieces",
    [[[-1]], [[10**6]], [[1.5]], [[True]], [["a"]], [[]], [1], {"a": 1}, "ab", None, [[1] * 300], [[1], [1] * 256]],
    ids=str,
)
def test_tokens_that_are_none_are_refused(trained: TrainedLanguageModel, tmp_path: Path, pieces: Any) -> None:
    store = opened(trained, tmp_path)
    name = [*turns(trained, store, TURNS[:1])][1]
    rewritten(tmp_path / f"{name}.state", lambda about: about.update(pieces=pieces))
    again = opened(trained, tmp_path)
    if name in {info.id for info in again.list()}:
        with pytest.raises(CheckpointError):
            again.get(name)


def test_a_file_whose_base_is_missing_or_has_no_state_is_left_alone(
    trained: TrainedLanguageModel, tmp_path: Path
) -> None:
    store = opened(trained, tmp_path)
    book, first, second = turns(trained, store, TURNS[:2])
    path, of_first = tmp_path / f"{second}.state", store._files.live[first].name
    before = path.read_bytes()
    for base in (None, ["unknown", "0"], list(of_first), [second, "0"]):
        rewritten(path, lambda about, base=base: about.update(base=base))
        assert [info.id for info in opened(trained, tmp_path).list()] == [book, first] and path.exists()
        path.write_bytes(before)
    (tmp_path / f"{book}.state").rename(tmp_path / "aside")
    assert opened(trained, tmp_path).list() == []


def test_unread_text_that_is_none_is_refused(trained: TrainedLanguageModel, tmp_path: Path) -> None:
    store = opened(trained, tmp_path)
    name = [*turns(trained, store, TURNS[:1])][1]
    path, limit = tmp_path / f"{name}.state", session_file.limit_of(trained.model)
    file, about = session_file.describe(path)
    whole = file.whole(limit)
    for changed in (
        {},
        {**whole, "state.position": torch.tensor([1])},
        {**whole, "unread.pending": torch.tensor([[300]], dtype=torch.int16)},
        {**whole, "unread.chosen": whole["unread.chosen"].float()},
    ):
        more = {key: value for key, value in about.items() if key not in ("format", "sha256", "pieces")}
        session_file.save(path, more, session_file.pack(changed, limit), file.base, file.pieces)
        with pytest.raises(CheckpointError):
            opened(trained, tmp_path).get(name)


def test_files_of_both_kinds_live_together(
    trained: TrainedLanguageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder of before, continued; and one of now, continued by states alone."""
    for limits in ((-1, 256), (256, 0)):
        folder, sessions = tmp_path / str(limits), {}
        for most in limits:
            with monkeypatch.context() as patch:
                patch.setattr(session_file, "MOST_READ", most)
                store = opened(trained, folder)
                if not sessions:
                    sessions = grown(trained, store, TURNS[:3])
                else:
                    patch.setattr(session_file, "MOST_READ", 256)
                    store = opened(trained, folder)
                    patch.setattr(session_file, "MOST_READ", most)
                    name = [*sessions][-1]
                    for text in TURNS:
                        before = store.get(name)
                        name = store.create(trained.read(text, before), name, before).id
                        sessions[name] = store.get(name)
        again = opened(trained, folder)
        assert all(is_equal(again.get(name), session) for name, session in sessions.items())
