"""Sessions on disk: none is lost, none is anybody else's, and each goes on as if it had never slept."""

import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from grids import every_nth
from interop.exported import FORMS, write_run
from serving.engines import loaded, tiny

import lmlong
from lmlong.attention.base import state_tensors
from lmlong.inference import session_file
from lmlong.inference.loading import TrainedLanguageModel
from lmlong.model.state import rebuild_state
from lmlong.serving.sessions import NoState, QuotaReached, SessionStore, UnknownSession
from lmlong.serving.settings import Settings


@pytest.fixture(scope="module")
def trained() -> TrainedLanguageModel:
    return tiny()


@every_nth(2, pytest.mark.parametrize("form", ["ngram", "elu", "softmax", "delta", "tables"]))
def test_a_session_goes_on_the_same_asleep_awake_and_after_a_restart(tmp_path: Path, form: str) -> None:
    trained = loaded(tmp_path / "run", native=False, **FORMS[form])
    session = trained.read("abcd" * 50)
    expected = "".join(trained.stream("dd", state=session))
    store = SessionStore(trained, tmp_path / "sessions")
    info = store.create(session)
    assert (info.tokens, info.parent, info.tail[-4:]) == (int(session.total), None, "abcd")
    asleep = SessionStore(lmlong.load(tmp_path / "run"), tmp_path / "sessions", Settings(memory=0))
    assert asleep.list() == [info]
    for one in (store, asleep):
        assert "".join(trained.stream("dd", state=one.get(info.id))) == expected


def test_what_it_has_become_and_what_it_was_forked_from(trained: TrainedLanguageModel, tmp_path: Path) -> None:
    store = SessionStore(trained, tmp_path / "sessions")
    first = store.create(trained.read("abc"))
    second = store.fork(first.id)
    grown = store.update(first.id, trained.read("dcba" * 9, store.get(first.id)))
    assert grown.id == first.id and grown.made == first.made and grown.tokens == first.tokens + 36
    assert second.parent == first.id and int(store.get(second.id).total) == first.tokens
    again = SessionStore(trained, tmp_path / "sessions")
    assert again.list() == store.list() == [grown, second]
    store.delete(first.id)
    assert [info.id for info in store.list()] == [second.id]
    assert len(list((tmp_path / "sessions").iterdir())) == 1
    with pytest.raises(UnknownSession):
        store.get(first.id)


def test_memory_holds_the_latest_used(trained: TrainedLanguageModel, tmp_path: Path) -> None:
    session = trained.read("abc")
    size = sum(x.numel() * x.element_size() for x in state_tensors(session))
    store = SessionStore(trained, tmp_path / "sessions", Settings(memory=3 * size))
    ids = [store.create(session).id for _ in range(9)]
    assert store.count == 9 and 0 < store.awake_bytes <= 3 * size
    woken = store.get(ids[0])
    assert store.get(ids[0]) is woken  # which stayed awake
    assert store.awake_bytes <= 3 * size
    assert all(map(torch.equal, state_tensors(woken), state_tensors(session)))


def test_a_server_has_so_many_sessions_and_bytes(trained: TrainedLanguageModel, tmp_path: Path) -> None:
    size = SessionStore(trained, tmp_path / "one").create(trained.read("abc")).bytes
    store = SessionStore(trained, tmp_path / "few", Settings(max_sessions=2))
    kept = [store.create(trained.read("abc")) for _ in range(2)]
    with pytest.raises(QuotaReached, match="2 sessions"):
        store.fork(kept[0].id)
    store.update(kept[0].id, trained.read("abcd"))
    settings = Settings(max_session_bytes=2 * size + 99)
    small = SessionStore(trained, tmp_path / "small", settings)
    for _ in range(2):
        small.create(trained.read("abc"))
    with pytest.raises(QuotaReached, match="bytes"):
        small.create(trained.read("abc"))
    assert len(list((tmp_path / "small").iterdir())) == 2
    for _ in range(3):  # what is written anew, or deleted, leaves room
        first, second = small.list()
        small.update(first.id, trained.read("abcd"))
        small.delete(second.id)
        small.create(trained.read("abc"))
    again = SessionStore(trained, tmp_path / "small", settings)
    assert again.file_bytes == small.file_bytes == sum(path.stat().st_size for path in again.folder.iterdir())
    with pytest.raises(QuotaReached, match="bytes"):
        again.create(trained.read("abc"))


def test_what_anybody_uploads_is_refused_unless_it_is_a_state_of_this_model(
    trained: TrainedLanguageModel, tmp_path: Path
) -> None:
    other = tiny("delta")
    store = SessionStore(trained, tmp_path / "sessions")
    session = trained.read("abc")
    trained.save_state(session, tmp_path / "good.state")
    other.save_state(other.read("abc"), tmp_path / "other.state")
    (tmp_path / "noise.state").write_bytes(os.urandom(3000))
    whole = (tmp_path / "good.state").read_bytes()
    (tmp_path / "cut.state").write_bytes(whole[: len(whole) // 2])
    flipped = bytearray(whole)
    flipped[-5] ^= 1
    (tmp_path / "flipped.state").write_bytes(bytes(flipped))
    state = session.state
    for name, number in (("nan", math.nan), ("inf", math.inf)):
        broken = rebuild_state(state.blocks, iter([torch.full_like(x, number) for x in state_tensors(state.blocks)]))
        trained.save_state(session._replace(state=state._replace(blocks=broken)), tmp_path / f"{name}.state")
    assert store.upload((tmp_path / "good.state").read_bytes()).tokens == int(session.total)
    for name in ("other", "noise", "cut", "flipped", "nan", "inf"):
        with pytest.raises(NoState):
            store.upload((tmp_path / f"{name}.state").read_bytes())
    assert store.count == 1 and len(list(store.folder.iterdir())) == 1


def test_a_folder_may_hold_damaged_files_and_those_of_other_models(
    trained: TrainedLanguageModel, tmp_path: Path
) -> None:
    store = SessionStore(trained, tmp_path / "sessions")
    kept = store.create(trained.read("abc"))
    (tmp_path / "sessions" / "noise.state").write_bytes(b"noise")
    other = tiny("delta")
    again, of_other = (SessionStore(one, tmp_path / "sessions") for one in (trained, other))
    assert again.list() == [kept] and again.count == 1
    assert of_other.list() == [] and of_other.count == 0
    assert sorted(path.name for path in (tmp_path / "sessions").iterdir()) == sorted(
        [f"{kept.id}.state", "noise.state"]
    )


def test_only_what_a_killed_server_left_is_removed(trained: TrainedLanguageModel, tmp_path: Path) -> None:
    folder = tmp_path / "sessions"
    kept = SessionStore(trained, folder).create(trained.read("abc"))
    whole, name = (folder / f"{kept.id}.state").read_bytes(), "0" * 24
    for left, size in ((f"{name}.new", 100), (f".{name}.new", 0), (f"..{name}.new.partial", 5000)):
        (folder / left).write_bytes(whole[:size])
    mine = {"thesis.partial", "notes.new", f"{'1' * 24}.new", f"{kept.id}-copy.base", "copy.state", f"{'2' * 24}.state"}
    for each in mine:
        (folder / each).write_bytes(whole if each.endswith((".base", ".state")) else b"mine")
    (folder / "folder.new").mkdir()
    (folder / f"{'3' * 24}.new").mkdir()
    assert SessionStore(trained, folder).list() == [kept]
    beside = {"folder.new", f"{'3' * 24}.new", f"{kept.id}.state"}
    assert {path.name for path in folder.iterdir()} == mine | beside


ODD: dict[str, list[Any]] = {
    "made": [10**400, math.nan, math.inf, -1, True, "now"],
    "parent": [math.nan, "\ud800", 7, ["a"]],
    "learns": [math.nan, "\ud800", "everything", []],
    "state_bytes": [math.nan, -1, 10**400, "\ud800", 1.5],
    "tokens": [-1, 0, 10**400],
}


def test_a_file_with_odd_metadata_is_skipped_with_one_line(
    trained: TrainedLanguageModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = SessionStore(trained, tmp_path).create(trained.read("abc"))
    about = session_file.describe(tmp_path / f"{kept.id}.state")[1]
    del about["format"], about["sha256"]
    odd = [{key: value} for key, values in ODD.items() for value in values]
    for number, changed in enumerate(odd):
        name = f"{number:024x}"
        packed = session_file.Packed(b"rows", b"whole")
        session_file.save(tmp_path / f"{name}.state", {**about, "id": name, **changed}, packed, None)
    again = SessionStore(trained, tmp_path)
    assert again.list() == [kept] and again.page(9).infos == [kept]
    lines = capsys.readouterr().err.splitlines()
    assert [f"skipped {tmp_path / f'{number:024x}.state'}:" in line for number, line in enumerate(lines)] == [
        True
    ] * len(odd)


CHILD = """
import sys
from pathlib import Path
import lmlong
from lmlong.serving.sessions import SessionStore
trained = lmlong.load(sys.argv[1])
store = SessionStore(trained, Path(sys.argv[2]))
names = [info.id for info in store.list()]
session = trained.read("abc")
while True:
    if len(names) < 3:
        info = store.create(session)
        names.append(info.id)
    else:
        names.append(names.pop(0))
        info = store.update(names[-1], trained.read("dcba", store.get(names[-1])))
    print(info.id, info.tokens, flush=True)
"""


def test_no_session_that_was_told_of_is_lost_by_a_kill(tmp_path: Path) -> None:
    write_run(tmp_path / "run", **FORMS["ngram"])
    trained = lmlong.load(tmp_path / "run")
    told: dict[str, int] = {}
    for number in range(2):
        words = [sys.executable, "-c", CHILD, str(tmp_path / "run"), str(tmp_path / "sessions")]
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            lines = [child.stdout.readline() for _ in range(5)]
            time.sleep(0.01 + 0.03 * number)
            child.send_signal(signal.SIGKILL)
            lines += child.stdout.readlines()
        told |= {name: int(tokens) for name, tokens in (line.split() for line in lines if line.endswith("\n"))}
        store = SessionStore(trained, tmp_path / "sessions", Settings(memory=0))
        found = {info.id: info.tokens for info in store.list()}
        assert all(found[name] - tokens in (0, 4) for name, tokens in told.items())
        told = found
        for name, tokens in found.items():
            text = "abc" + "dcba" * ((tokens - 4) // 4)
            expected = "".join(trained.stream("d", state=trained.read(text), temperature=0, max_tokens=9))
            woken = store.get(name)
            assert "".join(trained.stream("d", state=woken, temperature=0, max_tokens=9)) == expected
    assert max(told.values()) > 8
