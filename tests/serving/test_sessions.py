"""Sessions on disk: none is lost, and only files of sessions are ever deleted."""

import asyncio
import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from machine import largest_file
from models import FORMS, write_run
from serving.schedulers import tiny
from serving.turns import (
    BOOK,
    continued,
    created,
    files,
    forked,
    is_equal,
    listed,
    opened,
    place,
    session,
    size,
    turn,
    without_states,
)

import lmlong
from lmlong.attention.base import state_tensors
from lmlong.errors import CheckpointError, LmlongError, UsageError
from lmlong.inference.loading import TrainedLanguageModel
from lmlong.model.state import rebuild_state, state_bytes
from lmlong.serving.api_errors import ApiError
from lmlong.serving.server import locked
from lmlong.serving.session_change import Change, Sessions
from lmlong.serving.session_store import SessionStore


@pytest.fixture(scope="module")
def trained() -> TrainedLanguageModel:
    return tiny()


def path_of(store: SessionStore, name: str) -> Path:
    return store.folder.path / f"{name}.session"


def dumped(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def rewrite(path: Path, change: Callable[[list[Any]], Any]) -> None:
    """Change the lines of a file, as anybody can."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    change(lines)
    path.write_text("".join(f"{dumped(line)}\n" for line in lines))


def test_sessions_are_listed_as_they_are_after_a_restart(trained: TrainedLanguageModel, tmp_path: Path) -> None:
    store = opened(trained, tmp_path)
    first = store.save(turn(store, "abcd" * 50))
    assert (first.tokens, first.parent, first.tail) == (201, None, "abcd" * 50)
    second = store.fork(first.id)
    grown = store.info(continued(store, first.id, "dcba" * 9))
    assert grown.created == first.created and grown.tokens == first.tokens + 36
    assert second.parent == first.id and second.tokens == first.tokens
    again = opened(trained, tmp_path)
    assert listed(again) == listed(store) == [grown, second]
    assert again.folder.bytes == store.folder.bytes == size(tmp_path)


def test_a_line_has_only_what_is_not_known_otherwise(trained: TrainedLanguageModel, tmp_path: Path) -> None:
    store = opened(trained, tmp_path)
    name = created(store, "abcd" * 50)
    continued(store, name, "dcba" * 9, answer=5)
    _, first, last = (json.loads(line) for line in path_of(store, name).read_text().splitlines())
    assert set(first) == {"pieces", "at", "tokens", "state_bytes"} and set(last) == {*first, "before"}
    assert last["before"] == ("abcd" * 50)[-200 + 36 + 5 :]
    fork = store.fork(name)
    assert fork.tail == store.info(name).tail and fork.state_bytes == state_bytes(trained.read("a").state)
    assert [info.tail for info in listed(opened(trained, tmp_path))] == [fork.tail] * 2


def test_files_of_earlier_versions_are_read(trained: TrainedLanguageModel, tmp_path: Path) -> None:
    store = opened(trained, tmp_path)
    name = created(store, "abcd" * 50)
    expected = session(store, name)
    old = {"state_bytes": 7, "learns": False, "tail": "abcd" * 50, "options": {"max_tokens": 200, "stop": []}}
    rewrite(path_of(store, name), lambda lines: lines[1].update(old))
    again = opened(trained, tmp_path)
    assert (again.info(name).state_bytes, again.info(name).tail) == (7, old["tail"])
    assert is_equal(session(again, name), expected)
    assert again.info(continued(again, name, "dcba")).tail == ("abcd" * 50 + "dcba")[-200:]


def test_memory_and_disk_keep_the_states_used_last(trained: TrainedLanguageModel, tmp_path: Path) -> None:
    texts = [character * 300 for character in "abcdefghi"]
    store = opened(trained, tmp_path / "one", memory=1 << 30)
    created(store, texts[0])
    most, file = 3 * store.states.bytes, 3 * store.states.disk_bytes
    store = opened(trained, tmp_path / "nine", memory=most, disk=file)
    names = [created(store, text) for text in texts]
    assert 0.6 * most < store.states.bytes <= most and 0.6 * file < store.states.disk_bytes <= file
    assert session(store, names[0]).state is session(store, names[0]).state, "which stayed in memory"
    states = [path.stat().st_size for path in (store.folder.path / "states").iterdir()]
    assert sum(states) == store.states.disk_bytes == opened(trained, store.folder.path).states.disk_bytes


def test_server_refuses_more_sessions_and_bytes_than_its_quota(trained: TrainedLanguageModel, tmp_path: Path) -> None:
    store = opened(trained, tmp_path / "few", max_sessions=2)
    names = [created(store) for _ in range(2)]
    with pytest.raises(ApiError, match="2 sessions") as refused:
        store.fork(names[0])
    assert (refused.value.status, refused.value.code) == (429, "insufficient_quota")
    continued(store, names[0], "d")
    small = opened(trained, tmp_path / "small", max_session_bytes=2 * store.info(names[1]).bytes + 99)
    for _ in range(2):
        created(small)
    for again in (small, opened(trained, tmp_path / "small", max_session_bytes=small.folder.bytes + 99)):
        with pytest.raises(ApiError, match="bytes"):
            created(again)
        with pytest.raises(ApiError, match="bytes"):
            continued(again, listed(again)[0].id, "a" * 100)
        assert again.folder.bytes == size(again.folder.path)
    small.folder.delete(listed(small)[0].id)
    created(small)


def test_uploaded_state_learns_as_asked(trained: TrainedLanguageModel, tmp_path: Path) -> None:
    store = opened(trained, tmp_path / "sessions")
    for learn in (False, True):
        trained.save_state(trained.read("abc", learn=learn), tmp_path / "book.state")
        data = (tmp_path / "book.state").read_bytes()
        assert store.upload(data).learns is learn and store.upload(data, True).learns
    with pytest.raises(ApiError, match="learns until its end"):
        store.upload(data, False)


def test_upload_that_is_not_a_state_of_this_model_is_refused(trained: TrainedLanguageModel, tmp_path: Path) -> None:
    other = tiny("delta")
    store = opened(trained, tmp_path / "sessions")
    text = trained.read("abc")
    trained.save_state(text, tmp_path / "good.state")
    other.save_state(other.read("abc"), tmp_path / "other.state")
    whole = (tmp_path / "good.state").read_bytes()
    flipped = bytearray(whole)
    flipped[-5] ^= 1
    uploads = [os.urandom(3000), whole[: len(whole) // 2], bytes(flipped), (tmp_path / "other.state").read_bytes(), b""]
    for number in (math.nan, math.inf):
        blocks = text.state.blocks
        broken = rebuild_state(blocks, iter([torch.full_like(x, number) for x in state_tensors(blocks)]))
        trained.save_state(text._replace(state=text.state._replace(blocks=broken)), tmp_path / "broken.state")
        uploads.append((tmp_path / "broken.state").read_bytes())
    for data in uploads:
        with pytest.raises(ApiError, match="not a state of this model"):
            store.upload(data)
    assert store.folder.count == 0 and files(store.folder.path) == set()


@pytest.mark.parametrize("uploads", [False, True], ids=["text", "uploaded state"])
def test_files_of_deleted_sessions_stay_while_forks_need_them(
    trained: TrainedLanguageModel, tmp_path: Path, uploads: bool
) -> None:
    trained.save_state(trained.read("abc" * 50), tmp_path / "book.state")
    folder, data = tmp_path / "sessions", (tmp_path / "book.state").read_bytes()
    store = opened(trained, folder)
    names = [store.upload(data).id if uploads else created(store, "abc" * 50)]
    assert store.info(names[0]).tokens == 151 and (store.folder.bytes > len(data)) == uploads
    for text in ("a", "b", "c"):
        names.append(forked(store, names[-1], text, answer=5))
    expected = session(store, names[-1])
    for name in names[:-1]:
        store.folder.delete(name)
        with pytest.raises(ApiError, match="not found"):
            place(store, name)
    without_states(folder)
    for again in (store, opened(trained, folder)):
        assert [info.id for info in listed(again)] == names[-1:] and len(files(folder)) == 4 + uploads
        assert again.folder.bytes == size(folder)
        assert is_equal(session(again, names[-1]), expected)
    again.folder.delete(names[-1])
    assert files(folder) == set() and again.folder.bytes == 0


def test_a_kill_between_two_deletions_leaves_no_file(trained: TrainedLanguageModel, tmp_path: Path) -> None:
    store = opened(trained, tmp_path)
    name = created(store)
    fork = store.fork(name).id
    store.folder.delete(name)
    path_of(store, fork).unlink()
    assert listed(opened(trained, tmp_path)) == [] and files(tmp_path) == set()


def test_session_without_its_parent_is_skipped_until_that_is_back(
    trained: TrainedLanguageModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = opened(trained, tmp_path)
    first = created(store)
    second = forked(store, first, "a")
    third = forked(store, second, "b")
    store.folder.delete(first)
    path_of(store, second).rename(tmp_path / "aside")
    assert listed(opened(trained, tmp_path)) == []
    assert capsys.readouterr().err.count("a session that it begins with is missing") == 1
    (tmp_path / "aside").rename(path_of(store, second))
    assert is_equal(session(opened(trained, tmp_path), third), session(store, third))


def test_parents_in_a_circle_are_skipped(trained: TrainedLanguageModel, tmp_path: Path) -> None:
    store = opened(trained, tmp_path)
    names = [created(store)]
    names += [store.fork(names[0]).id, store.fork(names[0]).id]
    for name, parent in zip(names, (names[1], names[0], names[2]), strict=True):
        rewrite(path_of(store, name), lambda lines, parent=parent: lines[0].update(parent=parent))
    assert listed(opened(trained, tmp_path)) == [] and len(files(tmp_path)) == 3


def test_torn_last_line_is_dropped(trained: TrainedLanguageModel, tmp_path: Path) -> None:
    """At every byte: a turn is there or not, and a session without a turn was never acknowledged."""
    store = opened(trained, tmp_path)
    name = created(store)
    path, before = path_of(store, name), store.info(name)
    continued(store, name, "dcba")
    whole = path.read_bytes()
    begin = whole.index(b"\n") + 1
    for length in (0, 9, begin - 1, begin, begin + 9, before.bytes - 1):
        path.write_bytes(whole[:length])
        assert listed(opened(trained, tmp_path)) == [] and not path.exists()
    for length in (before.bytes, before.bytes + 1, len(whole) - 1):
        path.write_bytes(whole[:length])
        again = opened(trained, tmp_path)
        assert listed(again) == [before] and path.read_bytes() == whole[: before.bytes]
        continued(again, name, "dcba")
        assert is_equal(session(again, name), session(opened(trained, tmp_path), name))


def test_turn_that_the_disk_does_not_take_is_undone(trained: TrainedLanguageModel, tmp_path: Path) -> None:
    store = opened(trained, tmp_path)
    name = created(store)
    before, info, more = path_of(store, name).read_bytes(), store.info(name), turn(store, "dcba", place(store, name))
    with largest_file(info.bytes + 10), pytest.raises(LmlongError):
        store.save(more, name)
    assert path_of(store, name).read_bytes() == before and store.info(name) == info
    store.save(more, name)
    assert is_equal(session(opened(trained, tmp_path), name), session(store, name))


def test_only_files_of_sessions_are_deleted(trained: TrainedLanguageModel, tmp_path: Path) -> None:
    store = opened(trained, tmp_path)
    kept = created(store, "a" * 300)
    ours = files(tmp_path)
    state = next((tmp_path / "states").iterdir())
    whole, zeros = state.read_bytes(), "0" * 24
    (tmp_path / f"{'4' * 24}.root").write_bytes(whole[:5000])  # of an upload that was not completed
    (tmp_path / "states" / f".{'0' * 48}.state.lmlong-partial").write_bytes(whole[:5000])
    mine = ["thesis.partial", "notes.new", f"{zeros}.session", f"{zeros}.session.bak", f"{'1' * 24}.session"]
    mine += [f"{'1' * 24}.root", "notes.root"]
    for name in mine:
        (tmp_path / name).write_bytes(b"mine")
    copy = tmp_path / f"{'2' * 24}.session"
    copy.write_bytes(path_of(store, kept).read_bytes())
    (tmp_path / f"{'3' * 24}.session").mkdir()
    in_states = [tmp_path / "states" / name for name in ("notes", f"{'1' * 48}.state", ".notes.lmlong-partial")]
    for path in in_states:
        path.write_bytes(b"mine")
    again = opened(trained, tmp_path, disk=0)
    assert [info.id for info in listed(again)] == [kept]
    created(again, "b" * 300)  # which takes the only place on disk
    again.folder.delete(kept)
    assert files(tmp_path) == {*mine, copy.name, listed(again)[0].id + ".session"} and not ours & files(tmp_path)
    assert set((tmp_path / "states").iterdir()) == set(in_states)


@pytest.mark.parametrize("name", [f"{'0' * 24}.state", f"{'0' * 24}-{'1' * 16}.base"])
def test_folder_of_an_earlier_version_is_refused_and_untouched(
    trained: TrainedLanguageModel, tmp_path: Path, name: str
) -> None:
    (tmp_path / name).write_bytes(b"of an earlier version")
    with pytest.raises(UsageError, match=r"earlier version.*--sessions"):
        opened(trained, tmp_path)
    assert files(tmp_path) == {name}


def test_fork_during_whose_turn_its_parent_continues_and_is_deleted_is_kept(
    trained: TrainedLanguageModel, tmp_path: Path
) -> None:
    store = opened(trained, tmp_path)
    name = created(store, BOOK)
    more = turn(store, "dcba", place(store, name))
    without_states(tmp_path)
    store = opened(trained, tmp_path)

    async def go() -> str:
        sessions = Sessions(store, 10)
        change, unsaved = Change(sessions, name, fork=True), Change(sessions, name, fork=True)
        starting = asyncio.ensure_future(change.start(None))
        await asyncio.sleep(0)
        await sessions.run(store.save, more, name)
        start, _ = await starting
        assert start.tokens == 3001 and place(store, name).tokens == 3005
        without_states(tmp_path)
        starting = asyncio.ensure_future(unsaved.start(None))
        await asyncio.sleep(0)
        await sessions.run(store.folder.delete, name)
        assert not starting.done() and (await starting)[0].tokens == 3005
        unsaved.release()
        fork = (await change.save(turn(store, "ab", start))).id
        change.release()
        sessions.worker.close()
        return fork

    fork = asyncio.run(go())
    without_states(tmp_path)
    again = opened(trained, tmp_path)
    assert [info.id for info in listed(again)] == [fork] and is_equal(session(again, fork), session(store, fork))
    again.folder.delete(fork)
    assert files(tmp_path) == set()


def test_others_are_answered_while_a_session_is_read_again(trained: TrainedLanguageModel, tmp_path: Path) -> None:
    """It is read for one request at a time, and not to its end if nobody waits for it."""
    name = created(opened(trained, tmp_path), BOOK)
    without_states(tmp_path)
    store = opened(trained, tmp_path, memory=1 << 30)

    async def go() -> None:
        sessions = Sessions(store, 10)
        reading = [asyncio.ensure_future(sessions.read(store.start, name, False)) for _ in range(3)]
        await asyncio.sleep(0)
        assert (await sessions.run(store.info, name)).tokens == 3001 and not any(each.done() for each in reading)
        reading.pop(0).cancel()
        await sessions.run(store.info, name)
        assert not any((tmp_path / "states").iterdir()), "the state at its end is not known"
        one, other = await asyncio.gather(*reading)
        assert one[0].session.state is other[0].session.state
        sessions.worker.close()

    asyncio.run(go())


def test_file_of_a_deleted_session_goes_with_the_turn_that_would_have_forked_it(
    trained: TrainedLanguageModel, tmp_path: Path
) -> None:
    store = opened(trained, tmp_path)
    name = created(store)
    change = Change(Sessions(store, 10), name, fork=True)
    store.folder.delete(name)
    assert len(files(tmp_path)) == 1
    change.release()
    change.release()
    assert files(tmp_path) == set() and store.folder.bytes == 0


def test_folder_is_locked(tmp_path: Path) -> None:
    with locked(tmp_path), pytest.raises(UsageError, match="another server"), locked(tmp_path):
        pass


def test_sessions_of_other_models_are_left_alone(trained: TrainedLanguageModel, tmp_path: Path) -> None:
    store = opened(trained, tmp_path)
    name = created(store, "a" * 300)
    other = opened(tiny("delta"), tmp_path)
    assert listed(other) == []
    other.folder.delete(created(other))
    assert is_equal(session(opened(trained, tmp_path), name), session(store, name))


ODD: dict[str, list[Any]] = {
    "made": [10**400, math.nan, math.inf, -1, True, "now"],
    "parent": [math.nan, "\ud800", 7, ["a"], "0" * 24],
    "length": [-1, 10**400, 1.5],
    "root": ["../../x", 7],
    "format": [2, "1", 10**400, math.nan, None, []],
    "owners": [None, {"model": 7}],
    "learns": [math.nan, "\ud800", "everything", []],
    "state_bytes": [math.nan, -1, 10**400, "\ud800", 1.5],
    "tokens": [-1, 0, 10**400],
    "tail": [7, "\ud800"],
    "pieces": [
        [["read", [-1]]],
        [["read", [1.5]]],
        [["read", [True]]],
        [["read", []]],
        [["read", [1] * 300]],
        [["x", [1]]],
    ],
    "unread": [["", ""], ["", "", [-1]], [b"a".hex(), 7, []]],
    "more": [1],
}


def test_file_with_odd_values_is_skipped_with_one_line(
    trained: TrainedLanguageModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = opened(trained, tmp_path)
    kept = created(store)
    header, line = (json.loads(line) for line in path_of(store, kept).read_text().splitlines())
    odd = [(key, value) for key, values in ODD.items() for value in values]
    for number, (key, value) in enumerate(odd):
        name = f"{number:024x}"
        about, last = {**header, "id": name}, dict(line)
        (about if key in (*header, "parent", "length", "root") else last)[key] = value
        (tmp_path / f"{name}.session").write_text(f"{dumped(about)}\n{dumped(last)}\n")
    deep = tmp_path / f"{len(odd):024x}.session"
    deep.write_text(f"{dumped({**header, 'id': deep.stem})}\n{'[' * 10**5}\n")
    long = tmp_path / f"{len(odd) + 1:024x}.session"
    long.write_text(dumped({**header, "id": long.stem, "run": "a" * 10**5}) + "\n\n")
    again = opened(trained, tmp_path)
    assert [info.id for info in listed(again)] == [kept]
    lines = capsys.readouterr().err.splitlines()
    skipped = sorted(tmp_path.glob(f"{'0' * 20}*.session"))
    assert sorted(line.split(":")[0] for line in lines) == [f"skipped {path}" for path in skipped]
    assert len(lines) == len(odd) + 2 and max(map(len, lines)) < 500


def test_odd_values_within_a_file_are_refused(trained: TrainedLanguageModel, tmp_path: Path) -> None:
    store = opened(trained, tmp_path)
    name = created(store)
    fork = store.fork(name).id
    changes: list[Callable[[list[Any]], Any]] = [
        lambda lines: lines[1].update(pieces=[["read", [10**6, 1, 1, 1]]]),
        lambda lines: lines[1].update(pieces=[["read", [1, 2]]]),
        lambda lines: lines[1].update(pieces=[]),
        lambda lines: lines.insert(1, {"pieces": 7}),
        lambda lines: lines.insert(1, lines[0]),
        lambda lines: lines[1].update(unread=["", "\u4e00", []]),
        lambda lines: lines[1].update(unread=["", "\xff", []]),
        lambda lines: lines[1].update(unread=["", "a", [2**31 - 1]]),
        lambda lines: lines[1].update(unread=["", "a", [98]]),
        lambda lines: lines[1].update(unread=["", "a" * 10**6, []]),
        lambda lines: lines[0].update(root=True),
    ]
    before = path_of(store, name).read_bytes()
    for change in changes:
        rewrite(path_of(store, name), change)
        with pytest.raises(CheckpointError):
            place(opened(trained, tmp_path, disk=0), name)
        path_of(store, name).write_bytes(before)
    rewrite(path_of(store, fork), lambda lines: lines[0].update(length=2))
    with pytest.raises(CheckpointError):
        place(opened(trained, tmp_path), fork)


def test_damaged_or_foreign_states_are_read_again(trained: TrainedLanguageModel, tmp_path: Path) -> None:
    store = opened(trained, tmp_path)
    name = created(store, "abcd" * 100)
    (path,) = (tmp_path / "states").iterdir()
    whole, expected = path.read_bytes(), session(store, name)
    other = tiny("delta")
    other.save_state(other.read("a"), tmp_path / "other")
    for data in (b"", b"mine", whole[:-9], whole[:-9] + b"x" * 9, (tmp_path / "other").read_bytes()):
        path.write_bytes(data)
        assert is_equal(session(opened(trained, tmp_path), name), expected)


def test_session_that_another_program_changes_is_refused(trained: TrainedLanguageModel, tmp_path: Path) -> None:
    store = opened(trained, tmp_path, memory=1 << 30)
    name = created(store)
    with path_of(store, name).open("ab") as file:
        file.write(b"{}\n")
    for call in (lambda: place(store, name), lambda: store.fork(name), lambda: store.save(turn(store, "a"), name)):
        with pytest.raises(CheckpointError, match="changed"):
            call()
    path_of(store, name).unlink()
    with pytest.raises(ApiError, match="not found"):
        place(store, name)
    assert store.folder.bytes == 0


CHILD = """
import random, sys
from pathlib import Path
import lmlong
run, folder, seed, tests = sys.argv[1:]
sys.path.insert(0, tests)
from serving.turns import continued, created, listed, opened
store, draw = opened(lmlong.load(run), Path(folder)), random.Random(int(seed))
while True:
    names = [info.id for info in listed(store)]
    kind = draw.choice(["create", "turn", "turn", "fork", "delete"]) if len(names) > 2 else "create"
    name = draw.choice(names) if kind != "create" else "new"
    print("begin", kind, name, 0, flush=True)
    if kind == "create":
        name = created(store)
    elif kind == "turn":
        continued(store, name, "dcba", answer=3)
    elif kind == "fork":
        name = store.fork(name).id
    else:
        store.folder.delete(name)
    print("end", kind, name, store.info(name).tokens if kind != "delete" else 0, flush=True)
"""


def test_no_acknowledged_turn_is_lost_by_a_kill(tmp_path: Path, kills: int = 2) -> None:
    """The store is in a process, since nothing else can be killed."""
    write_run(tmp_path / "run", **FORMS["ngram"])
    trained, folder = lmlong.load(tmp_path / "run"), tmp_path / "sessions"
    known: dict[str, int] = {}
    for number in range(kills):
        words = [sys.executable, "-c", CHILD, *map(str, (tmp_path / "run", folder, number, Path(__file__).parents[1]))]
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            lines = [child.stdout.readline() for _ in range(40)]
            time.sleep(random.Random(number).uniform(0, 0.02))
            child.send_signal(signal.SIGKILL)
            lines += child.stdout.readlines()
        events = [line.split() for line in lines if line.endswith("\n")]
        for when, kind, name, tokens in events:
            if when == "end":
                known[name] = int(tokens)
                if kind == "delete":
                    del known[name]
        store = opened(trained, folder)
        found = {info.id: info.tokens for info in listed(store)}
        when, kind, name, _ = events[-1]
        if when == "begin" and kind == "turn":
            assert found[name] - known[name] in (0, 7)
        elif when == "begin" and kind == "delete":
            known = {each: tokens for each, tokens in known.items() if each != name or name in found}
        elif when == "begin":
            assert len(found) - len(known) in (0, 1)
        assert all(found[each] == tokens for each, tokens in known.items() if (each, kind) != (name, "turn"))
        assert all(place(store, each).tokens == tokens for each, tokens in found.items())
        known = found
    for each in known:
        store.folder.delete(each)
    assert files(folder) == set() and store.folder.bytes == 0
