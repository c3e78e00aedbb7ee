"""Sessions over HTTP: what is read once is never read again, nothing that was told is lost, and each tells its text."""

import http.client
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest
from grids import every_nth
from inference.crafted_states import craft, prepare
from machine import largest_file
from serving.schedulers import subwords, tiny
from serving.servers import (
    COMPLETIONS,
    JSON,
    SESSIONS,
    STATE_FILE,
    TEXT_FILE,
    Served,
    answered,
    refused,
    served,
    until,
)

from lmlong.inference.loading import TrainedLanguageModel
from lmlong.serving import request

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 20}
LIKELIHOODS: dict[str, Any] = {"seed": 1, "max_tokens": 30, "logprobs": 3}
FIELDS = {"id", "object", "parent", "created", "tokens", "bytes", "state_bytes", "learns", "given", "written", "tail"}
BOOK = "abacad cab, bad dab\n" * 30


@pytest.fixture(scope="module")
def trained() -> TrainedLanguageModel:
    return tiny("ngram", native=True, tokenizer=subwords())


@pytest.fixture(scope="module")
def server(trained: TrainedLanguageModel) -> Iterator[Served]:
    with served(trained, memory=0, max_tokens=10**6, lag=1 << 40) as server:  # all sessions but one sleep
        yield server


@pytest.fixture(autouse=True)
def without_sessions(server: Served) -> Iterator[None]:
    yield
    for name in listed(server):
        server.client.delete(f"{SESSIONS}/{name}")


def listed(server: Served) -> list[str]:
    return [session["id"] for session in server.get(SESSIONS)["data"]]


def told(server: Served, name: str) -> dict[str, Any]:
    """What is told of a session."""
    session = server.get(f"{SESSIONS}/{name}")
    assert session["object"] == "session" and set(session) == FIELDS
    return session


def appended(server: Served, name: str, text: str) -> dict[str, Any]:
    return answered(server.post(f"{SESSIONS}/{name}/append", text=text))


def forked(server: Served, name: str, prompt: str, **options: Any) -> dict[str, Any]:
    return server.completion(session=name, fork=True, prompt=prompt, **{**LIKELIHOODS, **options})


def passages(server: Served, name: str, query: str = "?logprobs=3") -> list[dict[str, Any]]:
    text = server.get(f"{SESSIONS}/{name}/text{query}")
    assert (text["id"], text["object"]) == (name, "session.text")
    return text["passages"]


def whole_text(server: Served, name: str) -> str:
    """The texts of a session and of those that it was forked from."""
    parent = told(server, name)["parent"]
    own = "".join(passage["text"] for passage in passages(server, name, ""))
    return (whole_text(server, parent) if parent else "") + own


def test_a_session_goes_on_as_if_all_had_been_one_prompt(server: Served) -> None:
    for parts in ([BOOK, "abac", "ad cab"], [BOOK[:-7], BOOK[-7:] + "a", ""]):
        first = server.session(parts[0])
        grown = appended(server, first["id"], parts[1])
        assert grown["id"] == first["id"] and grown["tokens"] >= first["tokens"]
        answer = server.completion(session=first["id"], prompt=parts[2], **GREEDY)
        assert [answer["choices"][0]["text"]] == server.texts(prompt="".join(parts), **GREEDY)
        assert answer["session"]["id"] == first["id"]
        assert answer["usage"]["prompt_tokens"] < 20, "the book is not read again"
        text = "".join(parts) + answer["choices"][0]["text"]
        assert answer["session"]["tail"] == text[-200:]
        more = server.completion(session=first["id"], **GREEDY)
        assert [more["choices"][0]["text"]] == server.texts(prompt=text, **GREEDY)
        assert told(server, first["id"]) == more["session"]


@pytest.mark.parametrize("fork", [False, True])
def test_a_stream_tells_the_session_last(server: Served, fork: bool) -> None:
    root = server.session(BOOK)["id"]
    options = {"stop": ["ab"], "prompt": "ca", "stream_options": {"include_usage": True}, **GREEDY}
    *events, last = server.events(COMPLETIONS, session=root, fork=fork, **options)
    name = last["session"]["id"]
    if fork:
        first = events.pop(0)
        assert first["session"] == {"id": name, "object": "session"} and first["choices"] == []
    text = "".join(choice["text"] for event in events for choice in event["choices"])
    assert last["choices"] == [] and last["usage"] and not any("session" in event for event in events)
    assert last["session"]["tail"].endswith((BOOK + "ca" + text)[-100:])
    until(lambda: server.service.scheduler.active == 0)
    other = forked(server, root, "")["session"]["id"]  # after what the server does once a stream has ended
    assert listed(server) == ([root, name, other] if fork else [root, other])
    assert told(server, name) == last["session"]


def test_a_long_list_comes_in_pages(server: Served) -> None:
    names = [server.session(text)["id"] for text in "abcde"]
    found, after, sizes = list[str](), "", list[int]()
    while after is not None:
        page = server.get(f"{SESSIONS}?limit=2{after and '&after='}{after}")
        found += [session["id"] for session in page["data"]]
        sizes.append(len(page["data"]))
        assert page["has_more"] == (page["next"] is not None)
        after = page["next"]
        if len(found) == 2:  # what is deleted, or made, meanwhile changes nothing else
            deleted = {"id": names[1], "object": "session.deleted", "deleted": True}
            assert answered(server.client.delete(f"{SESSIONS}/{names[1]}")) == deleted
            assert refused(server.client.get(f"{SESSIONS}/{names[1]}")) == (404, "session_not_found")
            names.append(server.session("f")["id"])
    assert found == names and sizes == [2, 2, 2]
    assert server.get(SESSIONS)["next"] is None


def test_reading_is_reported_while_it_lasts(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request, "REPORT_SECONDS", 0)
    books = [BOOK[start:] * 120 for start in range(3)]  # what was read before is not read again
    options = {"stream": True, "stream_options": {"include_progress": True}}
    streams: list[tuple[str, dict[str, Any]]] = [
        (f"{SESSIONS}?stream=true", {"content": books[0].encode(), "headers": TEXT_FILE}),
        (SESSIONS, {"json": {"text": books[1], "stream": True}}),
        (COMPLETIONS, {"json": {"prompt": books[2], "max_tokens": 3, **options}}),
    ]
    for book, (path, body) in zip(books, streams, strict=True):
        answer = server.client.post(path, **body)
        assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")
        lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
        assert lines.pop() == "[DONE]"
        events = [json.loads(line) for line in lines]
        if path == COMPLETIONS:
            assert all(event["choices"] == [] for event in events if "progress" in event)
            reports = [event["progress"] for event in events if "progress" in event]
        else:
            reports = events[:-1]
            assert told(server, events[-1]["id"]) == events[-1]
        shares = [report["read_bytes"] / report["total_bytes"] for report in reports]
        # a report is left out where the next one, or the answer, is ready with it
        assert len(shares) > 1 and shares == sorted(shares) and 0 < shares[0] < shares[-1] <= 1
        assert {report["object"] for report in reports} == {"progress"}
        assert {report["total_bytes"] for report in reports} == {len(book)}
    assert "progress" not in server.post(COMPLETIONS, prompt=BOOK, max_tokens=1, stream=True).text


def test_files_are_taken_and_given(server: Served, trained: TrainedLanguageModel, tmp_path: Path) -> None:
    book = answered(server.upload(b"\xef\xbb\xbf" + BOOK.encode(), TEXT_FILE), 201)["id"]
    answered(server.upload(b"cab", TEXT_FILE, f"{SESSIONS}/{book}/append"))
    file = server.client.get(f"{SESSIONS}/{book}/state")
    assert file.headers["content-type"] == STATE_FILE["Content-Type"]
    assert ".state" in file.headers["content-disposition"]
    (tmp_path / "file.state").write_bytes(file.content)
    state = trained.load_state(tmp_path / "file.state")
    expected = "".join(trained.stream("", state=state, **GREEDY))
    again = answered(server.upload(file.content, STATE_FILE), 201)["id"]
    for name in (again, book):
        assert server.texts(session=name, **GREEDY) == [expected] == server.texts(prompt=BOOK + "cab", **GREEDY)
    (own,) = passages(server, again, "")[:1]
    assert own["by"] == "state" and own["text"] == (BOOK + "cab")[-200:]
    answer = forked(server, again, " ad")
    assert whole_text(server, answer["session"]["id"]).endswith(expected + " ad" + answer["choices"][0]["text"])
    assert refused(server.upload(file.content[:-9], STATE_FILE)) == (400, "invalid_state")


def test_one_request_works_on_a_session_and_one_that_leaves_changes_nothing(server: Served) -> None:
    session = server.session(BOOK)
    name, scheduler = session["id"], server.service.scheduler
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    body = json.dumps({"session": name, "prompt": "ca", "stream": True, "max_tokens": 10**6, "temperature": 0})
    connection.request("POST", COMPLETIONS, body, JSON)
    until(lambda: scheduler.active == 1)
    for call in (
        lambda: server.post(COMPLETIONS, session=name),
        lambda: server.post(f"{SESSIONS}/{name}/append", text="a"),
        lambda: server.client.delete(f"{SESSIONS}/{name}"),
    ):
        assert refused(call()) == (409, "session_in_use")
    fork = answered(server.client.post(f"{SESSIONS}/{name}/fork"), 201)  # without a body
    assert (fork["parent"], fork["tokens"]) == (name, session["tokens"])
    connection.close()
    until(lambda: scheduler.active == 0)
    until(lambda: server.post(f"{SESSIONS}/{name}/append", text="").status_code == 200)
    found = told(server, name)
    assert found == {**session, "bytes": found["bytes"], "given": found["given"]}


def test_a_session_whose_file_is_damaged_or_removed_is_told(server: Served) -> None:
    store = server.service.sessions.store
    before = store.folder.bytes, store.folder.count
    calls: list[Callable[[str], httpx.Response]] = [
        lambda name: server.client.get(f"{SESSIONS}/{name}"),
        lambda name: server.client.get(f"{SESSIONS}/{name}/state"),
        lambda name: server.client.delete(f"{SESSIONS}/{name}"),
        lambda name: server.post(f"{SESSIONS}/{name}/fork"),
        lambda name: server.post(f"{SESSIONS}/{name}/append", text="a"),
        lambda name: server.post(COMPLETIONS, session=name, max_tokens=1),
    ]
    for call in calls:
        name = server.session("abc")["id"]
        (store.folder.path / f"{name}.session").unlink()
        assert refused(call(name)) == (404, "session_not_found")
        assert name not in listed(server)
        assert (store.folder.bytes, store.folder.count) == before
    name = server.session("abc")["id"]
    (store.folder.path / f"{name}.session").write_bytes(b"damaged")
    server.session("a")  # which lets the other one sleep
    assert refused(server.post(COMPLETIONS, session=name)) == (410, "session_damaged")
    assert "lmlong_sessions 2.0" in server.client.get("/metrics").text


def test_a_full_disk_is_told_and_leaves_nothing(server: Served) -> None:
    session = server.session(BOOK)
    state = server.client.get(f"{SESSIONS}/{session['id']}/state").content
    folder = server.service.sessions.store.folder.path
    there = sorted(folder.iterdir())
    with largest_file(300):
        answers = (
            server.post(SESSIONS, text=BOOK),
            server.upload(state, STATE_FILE),
            server.post(f"{SESSIONS}/{session['id']}/append", text="abac"),
            server.post(COMPLETIONS, session=session["id"], **GREEDY),
        )
    assert [refused(answer) for answer in answers] == [(507, "insufficient_storage")] * 4
    assert sorted(folder.iterdir()) == there
    assert told(server, session["id"]) == session


def test_text_of_forks_is_what_was_given_and_generated(server: Served) -> None:
    texts = {server.session(text)["id"]: text for text in ("", "b", "bad cab" * 100)}
    for prompt in (" dab", "", "a", ""):
        for parent, before in [*texts.items()][-3:]:
            answer = forked(server, parent, prompt)
            session, written = answer["session"], answer["choices"][0]["text"]
            texts[session["id"]] = before + prompt + written
            assert session["parent"] == parent and told(server, session["id"]) == session
            assert session["given"] + session["written"] == (prompt + written)[:80] or len(written) > 40
    for name, text in texts.items():
        assert whole_text(server, name) == text


def test_a_turn_keeps_the_options_that_are_not_defaults(server: Served) -> None:
    name = server.session("bad cab")["id"]
    for options in ({}, {"max_tokens": 20, "temperature": 0.5}, {"stop": ["x"], "top_p": 0.9}):
        server.completion(session=name, seed=7, **options)
        line = (server.service.sessions.store.folder.path / f"{name}.session").read_text().splitlines()[-1]
        assert json.loads(line)["options"] == {"seed": 7, **options}


def test_text_continues_at_every_character(server: Served) -> None:
    text = "abacad cab, bad dab"
    for end in range(1, len(text)):
        name = server.session(text[:end])["id"]
        for prompt in (text[end:], "\n"):
            answer = forked(server, name, prompt, max_tokens=1)
            assert whole_text(server, answer["session"]["id"]) == text[:end] + prompt + answer["choices"][0]["text"]


@pytest.mark.parametrize("learn", [False, True])
def test_likelihoods_are_those_of_the_generation(server: Served, learn: bool) -> None:
    answer = forked(server, server.session("bad cab")["id"], " dab " * 20, learn=learn)
    given, written = passages(server, answer["session"]["id"])
    assert (given["by"], given["logprobs"], written["by"]) == ("reader", None, "model")
    found, expected = written["logprobs"], answer["choices"][0]["logprobs"]
    assert found["tokens"] == expected["tokens"]
    assert found["token_logprobs"] == pytest.approx(expected["token_logprobs"], abs=1e-5)
    for likeliest, wanted in zip(found["top_logprobs"], expected["top_logprobs"], strict=True):
        assert likeliest == pytest.approx(wanted, abs=1e-5)
    assert passages(server, answer["session"]["id"], "")[-1]["logprobs"] is None


def test_fork_that_is_disconnected_keeps_what_was_generated(server: Served) -> None:
    root = server.session("bad cab")["id"]
    body = {"session": root, "fork": True, "prompt": " dab", "stream": True, "max_tokens": 10**6, "ignore_eos": True}
    with server.client.stream("POST", COMPLETIONS, json=body) as answer:
        events = (line for line in answer.iter_lines() if line.startswith("data: "))
        name = next(events).split('"session":{"id":"')[1][:24]
        for _ in range(5):
            next(events)
    until(lambda: server.client.get(f"{SESSIONS}/{name}").status_code == 200)
    given, written = passages(server, name)
    assert given["text"] == " dab" and len(written["text"]) >= 5 and written["by"] == "model"
    assert told(server, root)["tokens"] < 10, "the session itself is as before"


@every_nth(3, pytest.mark.parametrize("kind", ["ngram", "softmax", "parallel"]))
def test_a_crafted_state_is_refused_or_taken_and_no_other_text_notices(tmp_path: Path, kind: str) -> None:
    case, file, taken = prepare(tmp_path, [kind])[kind], tmp_path / "crafted.state", 0
    options: dict[str, Any] = {"prompt": "and so", "max_tokens": 5, "repetition_penalty": 1.2}
    with served(case.model) as server:
        expected = server.texts(seed=0, **options)
        for number in range(40):
            changed = craft(Random(number), case, file)
            upload = server.upload(file.read_bytes(), STATE_FILE)
            assert upload.status_code in (201, 400), f"{number}: {changed}: {upload.text}"
            if upload.status_code == 201:
                taken += 1
                answer = server.post(COMPLETIONS, session=upload.json()["id"], **options)
                assert answer.status_code in (200, 400), f"{number}: {changed}: {answer.text}"
        assert 0 < taken < 40
        assert server.texts(seed=0, **options) == expected
        assert server.client.get("/ready").status_code == 200
