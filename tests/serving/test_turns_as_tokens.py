"""A session is its tokens: its states may be deleted, and are computed again to the last bit."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from serving.schedulers import Told, loaded
from serving.turns import (
    BOOK,
    continued,
    created,
    forked,
    grown,
    is_equal,
    listed,
    opened,
    place,
    session,
    turn,
    without_states,
)

from lmlong.inference import state_file
from lmlong.inference.loading import TrainedLanguageModel
from lmlong.inference.sampling import Sampling
from lmlong.inference.session import advance, greedy
from lmlong.inference.state_table import PIECE
from lmlong.inference.unread import UnreadText
from lmlong.recipe import Attention, Ngram
from lmlong.serving.request import Request
from lmlong.serving.scheduler import Scheduler
from lmlong.serving.session_store import APART


def saved(folder: Path) -> list[int]:
    """The tokens of the states on disk."""
    return sorted(state_file.describe(path)["tokens"] for path in (folder / "states").iterdir())


@pytest.fixture(scope="module", params=[False, True], ids=["torch", "native"])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TrainedLanguageModel:
    attention = Attention(kind=["linear", "ngram", "window"], window=8, ngram=Ngram(sizes=[2, 4], buckets=1500))
    return loaded(tmp_path_factory.mktemp("model") / "run", native=request.param, attention=attention)


def test_turns_are_equal_to_the_last_bit_after_a_restart(trained: TrainedLanguageModel, tmp_path: Path) -> None:
    """Also without their states, and where only some of these are left."""
    store = opened(trained, tmp_path, memory=1 << 30)
    sessions = grown(store)
    assert all(info.bytes < 2000 for info in listed(store)[1:])
    assert 0 < len(list((tmp_path / "states").iterdir())) < 5
    for again in (opened(trained, tmp_path), opened(trained, tmp_path, disk=0)):
        for name, expected in reversed(sessions.items()):
            assert is_equal(session(again, name), expected)
        without_states(tmp_path)
    for name in list(sessions)[:-1]:
        again.folder.delete(name)
    assert is_equal(session(opened(trained, tmp_path), [*sessions][-1]), [*sessions.values()][-1])
    again.folder.delete([*sessions][-1])
    assert list(tmp_path.glob("*.session")) == []


def test_a_turn_continues_as_it_was_written(trained: TrainedLanguageModel, tmp_path: Path) -> None:
    """Its state differs from that of the steps by rounding only."""
    store = opened(trained, tmp_path)
    name = created(store, BOOK)
    read = turn(store, "abc", place(store, name), answer=5)
    assert read.read.session is not None
    stepped = greedy(trained.model, read.read.session, 5)
    store.save(read, name)
    stored = session(store, name)
    assert (stored.recent, stored.total) == (stepped.recent, stepped.total)
    for x, y in zip(
        stored.state.blocks[0].attention, trained.model.settle(stepped.state).blocks[0].attention, strict=True
    ):
        assert (x - y).norm() <= 1e-5 * y.norm()
    one, other = (greedy(trained.model, each, 20).recent for each in (stored, stepped))
    assert one == other


def test_session_keeps_its_newest_states_at_doubling_distances(trained: TrainedLanguageModel, tmp_path: Path) -> None:
    store = opened(trained, tmp_path)
    name = created(store, BOOK)
    for number in range(70):
        store = opened(trained, tmp_path) if number == 35 else store
        continued(store, name, BOOK[:150], answer=5)
    first, *distances = (store.info(name).tokens - tokens for tokens in reversed(saved(tmp_path)))
    assert first < 2 * PIECE and 3 <= len(distances) <= 6
    assert all(near < far <= 4 * near and far - near >= APART for near, far in pairwise(distances))
    assert is_equal(session(opened(trained, tmp_path, disk=0), name), session(store, name))


def test_short_session_keeps_its_newest_state(trained: TrainedLanguageModel, tmp_path: Path) -> None:
    store = opened(trained, tmp_path)
    name = created(store, BOOK[:300])
    for _ in range(6):
        continued(store, name, BOOK[:100], answer=5)
        assert len(saved(tmp_path)) == 1
    assert store.info(name).tokens - saved(tmp_path)[0] < PIECE


def test_states_are_deleted_with_the_last_session_that_has_their_text(
    trained: TrainedLanguageModel, tmp_path: Path
) -> None:
    store = opened(trained, tmp_path)
    book = created(store, BOOK)
    short, long, copy = (store.fork(book).id for _ in range(3))
    for name, text in ((book, BOOK[:1000]), (long, BOOK[1000:2200]), (long, BOOK[:1200])):
        continued(store, name, text)
    assert saved(tmp_path) == [3001, 4001, 4201, 5401]
    store = opened(trained, tmp_path)
    left = []
    for name in (book, long, copy, short):
        store.folder.delete(name)
        left.append(saved(tmp_path))
    assert left == [[3001, 4001, 4201, 5401], [3001, 4001], [3001, 4001], []]


def test_unread_text_is_kept(trained: TrainedLanguageModel, tmp_path: Path) -> None:
    store = opened(trained, tmp_path)
    name = created(store, BOOK)
    for text in (UnreadText(b"a", b"bc", tuple(trained.tokenizer.encode("bc"))), UnreadText(b"", b"d"), UnreadText()):
        name = store.fork(name).id
        store.save(turn(store, "ab", place(store, name))._replace(unread=text), name)
        fork = store.fork(name).id
        for each in (name, fork):
            found = session(opened(trained, tmp_path), each)
            assert found.unread == text and is_equal(found, session(store, name))


def test_session_that_learns_is_equal_to_the_last_bit(trained: TrainedLanguageModel, tmp_path: Path) -> None:
    """Its answers are not learned from, and a session may begin to learn."""
    store = opened(trained, tmp_path)
    learning, begun = created(store, BOOK[:400], answer=5, learn=True), created(store, BOOK[:400], answer=5)
    for name in (learning, begun):
        continued(store, name, "abc", answer=5, learn=True)
        continued(store, name, "", answer=5, learn=True)
        assert session(store, name).state.learned is not None
    without_states(tmp_path)
    again = opened(trained, tmp_path)
    assert all(is_equal(session(again, name), session(store, name)) for name in (learning, begun))
    assert not is_equal(session(again, learning), session(again, begun))


def test_answers_are_not_learned_from(trained: TrainedLanguageModel, tmp_path: Path) -> None:
    store = opened(trained, tmp_path)
    made = turn(store, BOOK[:100], answer=40, learn=True)
    assert made.read.session is not None
    steps = [(token, False) for piece in made.written for token in piece.tokens]
    stepped, stored = advance(trained.model, made.read.session, steps), session(store, store.save(made).id)
    assert stepped.state.learned is not None and stored.state.learned is not None
    assert torch.equal(stepped.state.learned.delta.D, stored.state.learned.delta.D)


def test_fork_does_not_follow_what_its_parent_becomes(trained: TrainedLanguageModel, tmp_path: Path) -> None:
    store = opened(trained, tmp_path)
    name = created(store, BOOK)
    before, fork = session(store, name), store.fork(name).id
    continued(store, name, "abc", answer=5)
    other = forked(store, fork, "dd")
    without_states(tmp_path)
    again = opened(trained, tmp_path)
    assert is_equal(session(again, fork), before)
    assert is_equal(session(again, other), session(store, other))
    assert again.info(name).tokens == before.total + 8


def test_session_of_a_text_that_was_written_before_is_equal_to_the_last_bit(
    trained: TrainedLanguageModel, tmp_path: Path
) -> None:
    """It begins with a state of the prompt, and not with that of the steps that wrote the answer."""
    store = opened(trained, tmp_path, memory=1 << 30)
    scheduler = Scheduler(trained, store.states)
    prompt = (trained.tokenizer.bos, *trained.tokenizer.encode(BOOK))
    try:
        events = Told(scheduler, Request(prompt, Sampling(temperature=0), max_tokens=20, alternatives=0)).all()
        written = [event.token.token for event in events if event.token]
        last = Told(scheduler, Request((*prompt, *written, 97), max_tokens=0, keep_session=True)).all()[-1]
    finally:
        scheduler.close()
    assert len(written) == 20 and last.cached_tokens == len(prompt) // PIECE * PIECE and last.turn is not None
    name = store.save(last.turn).id
    assert is_equal(session(opened(trained, tmp_path, disk=0), name), session(store, name))
