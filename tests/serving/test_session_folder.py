"""Sessions that are stored as differences: of a few bytes, equal to the last bit, and refused where a base is missing
or is another one."""

import json
import math
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from serving.engines import loaded
from torch import Tensor

from lmlong.attention.base import state_tensors
from lmlong.errors import CheckpointError
from lmlong.inference import byte_planes, session_file, sparse
from lmlong.inference.loading import TrainedLanguageModel
from lmlong.inference.session import Session
from lmlong.recipe import Attention, Ngram
from lmlong.serving import session_folder
from lmlong.serving.sessions import QuotaReached, SessionStore, UnknownSession
from lmlong.serving.settings import Settings

BOOK = "".join(random.Random(0).choices("abcd", k=3000))
TURNS = ["abc", "dcba", "bad", "cab dab", "a", "dd ab"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> TrainedLanguageModel:
    """A model with tables that a book fills."""
    attention = Attention(kind=["linear", "ngram"], ngram=Ngram(sizes=[2, 4], buckets=1500))
    return loaded(tmp_path_factory.mktemp("model") / "run", native=False, attention=attention)


@pytest.fixture(autouse=True)
def stored(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """How turns are stored: as what they change in the state, and in some tests also as tokens."""
    if getattr(request, "param", "changes") == "changes":
        monkeypatch.setattr(session_file, "MOST_READ", -1)


in_both_ways = pytest.mark.parametrize("stored", ["changes", "tokens"], indirect=True)


def opened(trained: TrainedLanguageModel, folder: Path, **changed: Any) -> SessionStore:
    """A store that keeps only one session in memory, as a server has it after a start."""
    return SessionStore(trained, folder, Settings(**{"memory": 0, **changed}))


def bits(session: Session) -> Iterator[bytes]:
    for x in state_tensors(session):
        yield x.clone(memory_format=torch.contiguous_format).flatten().view(torch.uint8).numpy().tobytes()


def is_equal(one: Session, other: Session) -> bool:
    return list(bits(one)) == list(bits(other))


def grown(trained: TrainedLanguageModel, store: SessionStore, texts: list[str]) -> dict[str, Session]:
    """A book, and turns of which each is a fork of the one before; return the sessions by their ids."""
    session = trained.read(BOOK)
    name = store.create(session).id
    found = {name: store.get(name)}
    for text in texts:
        name = store.fork(name).id
        store.update(name, trained.read(text, store.get(name)))
        found[name] = store.get(name)
    return found


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


@in_both_ways
def test_a_turn_is_a_few_bytes_and_equal_to_the_last_bit(trained: TrainedLanguageModel, tmp_path: Path) -> None:
    store = opened(trained, tmp_path)
    sessions = grown(trained, store, TURNS)
    book, *turns = (store.info(name) for name in sessions)
    assert book.bytes > 20_000 and all(turn.bytes < book.bytes / 3 for turn in turns)
    assert store.file_bytes == size(tmp_path) and len(list(tmp_path.iterdir())) == 1 + len(TURNS)
    for again in (store, opened(trained, tmp_path)):
        for name, session in reversed(sessions.items()):
            assert is_equal(again.get(name), session)
    assert [turn.parent for turn in turns] == list(sessions)[:-1]


def test_values_that_are_equal_as_numbers_are_told_apart() -> None:
    base = {"S": torch.zeros(1, 1, 2000, 4)}
    changed = {"S": base["S"].clone()}
    changed["S"][0, 0, 3, 1] = -0.0
    kept = sparse.pack(changed, base)
    assert kept["S" + sparse.INDICES].tolist() == [3]
    assert math.copysign(1, sparse.unpack(kept, base)["S"][0, 0, 3, 1]) == -1


@pytest.mark.parametrize("limit", [0, 10_000, 1 << 20])
def test_bytes_unpack_to_the_same_tensors(limit: int) -> None:
    torch.manual_seed(0)
    kinds = [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.bool]
    tensors = {str(kind): (9 * torch.randn(3, 0 if kind == torch.bool else 500)).to(kind) for kind in kinds}
    tensors |= {"one": torch.randn(9, 200)[:, :1][2], "few": torch.tensor([True, False]), "number": torch.tensor(3.5)}
    data = byte_planes.encode(tensors, limit)
    found = byte_planes.decode(data, limit)
    assert found.keys() == tensors.keys()
    for name, x in tensors.items():
        assert found[name].dtype == x.dtype and torch.equal(found[name], x)
    for damage in (data[:-1], data[:40], b"", data[:4] + b"\xff" * 9 + data[13:]):
        with pytest.raises(ValueError, match=r"."):
            byte_planes.decode(damage, limit)


def test_a_small_file_does_not_unpack_to_a_large_one() -> None:
    data = byte_planes.encode({"S": torch.zeros(1 << 22)}, 1 << 24)
    assert len(data) < 5_000
    with pytest.raises(ValueError, match="incomplete"):
        byte_planes.decode(data, 1 << 20)


def test_what_is_deleted_stays_while_others_need_it_and_counts(trained: TrainedLanguageModel, tmp_path: Path) -> None:
    store = opened(trained, tmp_path)
    sessions = grown(trained, store, TURNS)
    *deleted, last = sessions
    for name in deleted:
        before = store.file_bytes
        store.delete(name)
        with pytest.raises(UnknownSession):
            store.get(name)
        assert store.file_bytes == before == size(tmp_path)
    for again in (store, opened(trained, tmp_path)):
        assert [info.id for info in again.list()] == [last] and again.file_bytes == size(tmp_path)
        assert is_equal(again.get(last), sessions[last])
    again.delete(last)
    assert again.file_bytes == 0 and list(tmp_path.iterdir()) == []


@in_both_ways
def test_a_session_that_grows_keeps_one_base(trained: TrainedLanguageModel, tmp_path: Path) -> None:
    store = opened(trained, tmp_path)
    name = store.create(trained.read(BOOK)).id
    sizes = []
    for text in TURNS:
        sizes.append(store.update(name, trained.read(text, store.get(name))).bytes)
        assert len(list(tmp_path.iterdir())) == 2 and store.file_bytes == size(tmp_path)
        assert is_equal(opened(trained, tmp_path).get(name), store.get(name))
    assert sizes[0] < sizes[-1] < size(tmp_path) / 2
    fork = store.fork(name).id
    before = store.get(fork)
    store.update(name, trained.read("dab", store.get(name)))
    store.update(name, trained.read("dab", store.get(name)))
    again = opened(trained, tmp_path)
    assert is_equal(again.get(fork), before) and is_equal(again.get(name), store.get(name))
    again.delete(fork)
    again.delete(name)
    assert list(tmp_path.iterdir()) == []


def test_chains_are_bounded(trained: TrainedLanguageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_folder, "LONGEST", 4)
    store = opened(trained, tmp_path / "few")
    sessions = grown(trained, store, TURNS)
    depths = [store._files.live[name].depth for name in sessions]
    assert depths == [0, 1, 2, 3, 4, 1, 2], "the fifth fork is whole, and its own base once it is written on"
    monkeypatch.setattr(session_folder, "LONGEST", 99)
    monkeypatch.setattr(session_folder, "MOST_ROWS", 0)
    store = opened(trained, tmp_path / "none")
    assert {store._files.live[name].depth for name in grown(trained, store, TURNS[:2])} == {0}


@in_both_ways
def test_a_quota_counts_what_is_on_disk(trained: TrainedLanguageModel, tmp_path: Path) -> None:
    book = opened(trained, tmp_path / "one").create(trained.read(BOOK)).bytes
    store = opened(trained, tmp_path / "two", max_session_bytes=2 * book)
    sessions = [*grown(trained, store, TURNS[:2])]
    for name in sessions[:-1]:
        store.delete(name)
    with pytest.raises(QuotaReached):
        store.create(trained.read(BOOK))
    assert store.file_bytes == size(tmp_path / "two")
    store.delete(sessions[-1])
    store.create(trained.read(BOOK))


def rewritten(path: Path, change: Any) -> None:
    """Change the metadata of a file, and make its digest anew, as anybody can."""
    with safe_open(path, "pt") as file:
        about = json.loads(file.metadata()[session_file.KEY])
    change(about)
    del about["sha256"]
    about["sha256"] = session_file._digest(about)
    save_file(load_file(path), path, {session_file.KEY: json.dumps(about)})


def test_another_base_is_refused(trained: TrainedLanguageModel, tmp_path: Path) -> None:
    sessions = grown(trained, opened(trained, tmp_path / "all"), TURNS[:3])
    names = [*sessions]
    for name, other in ((names[0], names[1]), (names[1], names[2])):
        folder = shutil.copytree(tmp_path / "all", tmp_path / name)
        shutil.copyfile(folder / f"{other}.state", folder / f"{name}.state")
        again = opened(trained, folder)
        assert [info.id for info in again.list()] == names[: names.index(name)]
        assert len(list(folder.iterdir())) == 4, "what it is the base of stays"
    folder = shutil.copytree(tmp_path / "all", tmp_path / "swapped")
    again = opened(trained, folder)  # and is swapped while the server runs
    shutil.copyfile(folder / f"{names[1]}.state", folder / f"{names[2]}.state")
    with pytest.raises(CheckpointError):
        again.get(names[3])
    folder = shutil.copytree(tmp_path / "all", tmp_path / "renamed")
    path = folder / f"{names[2]}.state"
    rewritten(path, lambda about: about.update(tail="another"))  # with a digest that fits, but not its descendants
    assert [info.id for info in opened(trained, folder).list()] == names[:3]


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_chain_that_is_cut_is_refused(trained: TrainedLanguageModel, tmp_path: Path, number: int) -> None:
    sessions = grown(trained, opened(trained, tmp_path), TURNS[:3])
    names = [*sessions]
    path, aside = tmp_path / f"{names[number]}.state", tmp_path / "aside"
    running = opened(trained, tmp_path)
    path.rename(aside)
    with pytest.raises(CheckpointError):
        running.get(names[3])
    again = opened(trained, tmp_path)
    assert [info.id for info in again.list()] == names[:number] and len(list(tmp_path.iterdir())) == 4
    aside.rename(path)
    assert is_equal(opened(trained, tmp_path).get(names[3]), sessions[names[3]])


def test_what_a_cut_chain_needs_stays(trained: TrainedLanguageModel, tmp_path: Path) -> None:
    store = opened(trained, tmp_path)
    sessions = grown(trained, store, TURNS[:2])
    first, second, last = sessions
    store.delete(first)
    path, aside = tmp_path / f"{second}.state", tmp_path / "aside"
    path.rename(aside)
    assert opened(trained, tmp_path).list() == []
    aside.rename(path)
    assert is_equal(opened(trained, tmp_path).get(last), sessions[last])


@pytest.mark.parametrize("part", ["rows", "whole"])
def test_a_damaged_part_is_refused(trained: TrainedLanguageModel, tmp_path: Path, part: str) -> None:
    sessions = grown(trained, opened(trained, tmp_path), TURNS[:2])
    path = tmp_path / f"{[*sessions][2]}.state"
    parts = load_file(path)
    parts[part][-3] ^= 1
    with safe_open(path, "pt") as file:
        about = file.metadata()
    save_file(parts, path, about)
    with pytest.raises(CheckpointError):
        opened(trained, tmp_path).get(path.stem)


def test_rows_that_are_not_in_the_table_are_refused(trained: TrainedLanguageModel, tmp_path: Path) -> None:
    store = opened(trained, tmp_path)
    name = [*grown(trained, store, TURNS[:1])][1]
    path, limit = tmp_path / f"{name}.state", session_file.limit_of(trained.model)
    file, about = session_file.describe(path)
    rows, whole = file.rows(limit), file.whole(limit)

    def saved(rows: dict[str, Tensor], whole: dict[str, Tensor]) -> None:
        more = {key: value for key, value in about.items() if key not in ("format", "sha256")}
        session_file.save(path, more, session_file.pack({**rows, **whole}, limit), file.base)

    key = next(key for key in rows if key.endswith("S" + sparse.INDICES))
    missing = next(key for key in whole if key.endswith("last"))
    for changed, rest in (
        ({**rows, key: rows[key] + 10**6}, whole),
        ({**rows, key: rows[key][:-1]}, whole),
        (rows, {name: x for name, x in whole.items() if name != missing}),
        (rows, {**whole, missing: whole[missing] + 10**6}),
    ):
        saved(changed, rest)
        with pytest.raises(CheckpointError):
            opened(trained, tmp_path).get(name)
    saved(rows, whole)
    opened(trained, tmp_path).get(name)


def test_the_base_of_a_file_that_this_version_cannot_read_stays(trained: TrainedLanguageModel, tmp_path: Path) -> None:
    store = opened(trained, tmp_path)
    names = [*grown(trained, store, TURNS[:2])]
    store.delete(names[0])
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    for name in names[1:]:
        path = tmp_path / f"{name}.state"
        path.write_bytes(path.read_bytes().replace(b'\\"format\\": 1', b'\\"format\\": 9'))
    opened(trained, tmp_path)
    assert set(tmp_path.iterdir()) == before.keys()
    for path, data in before.items():
        path.write_bytes(data)
    assert len(opened(trained, tmp_path).list()) == len(names) - 1


@in_both_ways
def test_a_kill_between_a_base_and_what_needs_it_loses_nothing(
    trained: TrainedLanguageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(trained, tmp_path)
    name = store.create(trained.read(BOOK)).id
    before = store.get(name)

    class Killed(BaseException):
        pass

    def killed(*_: Any, **__: Any) -> None:
        raise Killed

    for step in ("replace", "unlink"):  # before the new file is in place, and before what is not needed is removed
        with monkeypatch.context() as patch:
            patch.setattr(Path, step, killed)
            with pytest.raises(Killed):
                store.update(name, trained.read("abc", before))
        assert len(list(tmp_path.iterdir())) == 2, "its base is there twice, or it and its base"
        (tmp_path / f"{name}.new").write_bytes((tmp_path / f"{name}.state").read_bytes()[:99])
        again = opened(trained, tmp_path)
        assert again.file_bytes == size(tmp_path)
        after = again.get(name)
        assert is_equal(after, before) if step == "replace" else int(after.total) == int(before.total) + 3
        assert len(list(tmp_path.iterdir())) == (1 if step == "replace" else 2)
        store = again


def test_state_files_of_before_are_sessions_and_bases(trained: TrainedLanguageModel, tmp_path: Path) -> None:
    from lmlong.inference import state_file

    tmp_path.joinpath("one").mkdir()
    session = trained.read(BOOK)
    about = {"owner": "of an earlier version", "parent": None, "made": 1.5, "learns": None}
    path = tmp_path / "one" / f"{'0' * 24}.state"
    whose = (trained.model, trained.owners, trained.tokenizer, "run")
    state_file.save(path, session, *whose, about)
    store = opened(trained, tmp_path / "one")
    (info,) = store.list()
    assert (info.made, info.state_bytes) == (1.5, None)
    fork = store.fork(info.id).id
    store.update(info.id, trained.read("abc", store.get(info.id)))
    again = opened(trained, tmp_path / "one")
    assert is_equal(
        again.get(fork),
        trained.load_state(path.with_name(f"{path.stem}-{store._files.live[fork].base.name.sha256[:16]}.base")),
    )  # type: ignore[union-attr]
    assert int(again.get(info.id).total) == int(session.total) + 3
    (tmp_path / "plain.state").write_bytes(again.file(info.id))
    assert is_equal(trained.load_state(tmp_path / "plain.state"), again.get(info.id))
