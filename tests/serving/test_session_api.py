"""Sessions over HTTP: what is read once is never read again, and nothing that was told is lost."""

import http.client
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from machine import largest_file
from serving.schedulers import subwords, tiny
from serving.servers import Served, served, until

from lmlong.inference.loading import TrainedLanguageModel
from lmlong.serving import request

SESSIONS, COMPLETIONS = "/v1/sessions", "/v1/completions"
TEXT_FILE = {"Content-Type": "application/octet-stream"}
STATE_FILE = {"Content-Type": "application/vnd.lmlong.state"}
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 20}
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
    for session in server.client.get(SESSIONS).json()["data"]:
        server.client.delete(f"{SESSIONS}/{session['id']}")


def made(answer: httpx.Response, status: int = 201) -> dict[str, Any]:
    """The session that an answer tells of."""
    assert answer.status_code == status, answer.text
    told = answer.json()
    assert told["object"] == "session" and set(told) == FIELDS
    return told


def refused(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


def test_a_session_goes_on_as_if_all_had_been_one_prompt(server: Served) -> None:
    for parts in ([BOOK, "abac", "ad cab"], [BOOK[:-7], BOOK[-7:] + "a", ""]):
        first = made(server.post(SESSIONS, text=parts[0]))
        grown = made(server.post(f"{SESSIONS}/{first['id']}/append", text=parts[1]), 200)
        assert grown["id"] == first["id"] and grown["tokens"] >= first["tokens"]
        answer = server.post(COMPLETIONS, session=first["id"], prompt=parts[2], **GREEDY).json()
        assert [answer["choices"][0]["text"]] == server.texts(prompt="".join(parts), **GREEDY)
        assert answer["session"]["id"] == first["id"]
        assert answer["usage"]["prompt_tokens"] < 20, "the book is not read again"
        text = "".join(parts) + answer["choices"][0]["text"]
        assert answer["session"]["tail"] == text[-200:]
        more = server.post(COMPLETIONS, session=first["id"], **GREEDY).json()
        assert [more["choices"][0]["text"]] == server.texts(prompt=text, **GREEDY)
        assert server.client.get(f"{SESSIONS}/{first['id']}").json() == more["session"]


def test_a_stream_tells_the_session_last(server: Served) -> None:
    session = made(server.post(SESSIONS, text=BOOK))
    options = {"stop": ["ab"], "prompt": "ca", "stream_options": {"include_usage": True}, **GREEDY}
    *events, last = server.events(COMPLETIONS, session=session["id"], **options)
    text = "".join(choice["text"] for event in events for choice in event["choices"])
    assert last["choices"] == [] and last["usage"] and not any("session" in event for event in events)
    assert last["session"]["tail"].endswith((BOOK + "ca" + text)[-100:])
    assert server.client.get(f"{SESSIONS}/{session['id']}").json() == last["session"]


def test_forks_go_their_own_ways(server: Served) -> None:
    root = made(server.post(SESSIONS, text=BOOK))
    fork = made(server.post(f"{SESSIONS}/{root['id']}/fork"))
    assert fork["parent"] == root["id"] and fork["tokens"] == root["tokens"]
    made(server.post(f"{SESSIONS}/{fork['id']}/append", text="bad bad bad"), 200)
    answer = server.post(COMPLETIONS, session=root["id"], prompt="ca", **GREEDY).json()
    assert [answer["choices"][0]["text"]] == server.texts(prompt=BOOK + "ca", **GREEDY)
    listed = server.client.get(SESSIONS).json()["data"]
    assert [one["id"] for one in listed] == [root["id"], fork["id"]]
    answer = server.client.delete(f"{SESSIONS}/{root['id']}")
    assert answer.json() == {"id": root["id"], "object": "session.deleted", "deleted": True}
    assert refused(server.client.get(f"{SESSIONS}/{root['id']}")) == (404, "session_not_found")
    assert [one["id"] for one in server.client.get(SESSIONS).json()["data"]] == [fork["id"]]


def test_a_long_list_comes_in_pages(server: Served) -> None:
    names = [made(server.post(SESSIONS, text=text))["id"] for text in ("a", "b", "c", "d", "e")]
    found, after, sizes = list[str](), "", list[int]()
    while after is not None:
        page = server.client.get(f"{SESSIONS}?limit=2{after and '&after='}{after}").json()
        found += [session["id"] for session in page["data"]]
        sizes.append(len(page["data"]))
        assert page["has_more"] == (page["next"] is not None)
        after = page["next"]
        if len(found) == 2:  # what is deleted, or made, meanwhile changes nothing else
            server.client.delete(f"{SESSIONS}/{names[1]}")
            names.append(made(server.post(SESSIONS, text="f"))["id"])
    assert found == names and sizes == [2, 2, 2]
    assert server.client.get(SESSIONS).json()["next"] is None
    for query in ("limit=0", "limit=1001", "limit=x", "limit=-1", "offset=1"):
        assert server.client.get(f"{SESSIONS}?{query}").status_code == 400


def test_reading_is_reported_while_it_lasts(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request, "REPORT_SECONDS", 0)
    books = [BOOK[start:] * 120 for start in range(3)]  # what was read before is not read again
    options = {"stream": True, "stream_options": {"include_progress": True}}
    streams = [
        ("POST", f"{SESSIONS}?stream=true", {"content": books[0].encode(), "headers": TEXT_FILE}),
        ("POST", SESSIONS, {"json": {"text": books[1], "stream": True}}),
        ("POST", COMPLETIONS, {"json": {"prompt": books[2], "max_tokens": 3, **options}}),
    ]
    for book, (method, path, body) in zip(books, streams, strict=True):
        with server.client.stream(method, path, **body) as answer:
            assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")
            lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: ")]
        assert lines.pop() == "[DONE]"
        events = [json.loads(line) for line in lines]
        if path == COMPLETIONS:
            assert all(event["choices"] == [] for event in events if "progress" in event)
            told = [event["progress"] for event in events if "progress" in event]
        else:
            told = events[:-1]
            assert made(server.client.get(f"{SESSIONS}/{events[-1]['id']}"), 200) == events[-1]
        shares = [event["read_bytes"] / event["total_bytes"] for event in told]
        # a report is left out where the next one, or the answer, is ready with it
        assert len(shares) > 1 and shares == sorted(shares) and 0 < shares[0] < shares[-1] <= 1
        assert {event["object"] for event in told} == {"progress"}
        assert {event["total_bytes"] for event in told} == {len(book)}
    refused(server.client.post(f"{SESSIONS}?stream=true", content=b"a\0", headers=TEXT_FILE))
    assert "progress" not in server.post(COMPLETIONS, prompt=BOOK, max_tokens=1, stream=True).text


def test_files_are_taken_and_given(server: Served, trained: TrainedLanguageModel, tmp_path: Path) -> None:
    book = server.client.post(SESSIONS, content=b"\xef\xbb\xbf" + BOOK.encode(), headers=TEXT_FILE)
    more = server.client.post(f"{SESSIONS}/{made(book)['id']}/append", content=b"cab", headers=TEXT_FILE)
    file = server.client.get(f"{SESSIONS}/{made(more, 200)['id']}/state")
    assert (
        file.headers["content-type"] == STATE_FILE["Content-Type"] and ".state" in file.headers["content-disposition"]
    )
    (tmp_path / "file.state").write_bytes(file.content)
    state = trained.load_state(tmp_path / "file.state")
    expected = "".join(trained.stream("", state=state, **GREEDY))
    again = made(server.client.post(SESSIONS, content=file.content, headers=STATE_FILE))
    for name in (again["id"], made(more, 200)["id"]):
        answer = server.post(COMPLETIONS, session=name, **GREEDY).json()
        assert answer["choices"][0]["text"] == expected == server.texts(prompt=BOOK + "cab", **GREEDY)[0]


def test_one_request_works_on_a_session_and_one_that_leaves_changes_nothing(server: Served) -> None:
    session = made(server.post(SESSIONS, text=BOOK))
    name, scheduler = session["id"], server.service.scheduler
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    body = json.dumps({"session": name, "prompt": "ca", "stream": True, "max_tokens": 10**6, "temperature": 0})
    connection.request("POST", COMPLETIONS, body, {"Content-Type": "application/json"})
    until(lambda: scheduler.active == 1)
    for call in (
        lambda: server.post(COMPLETIONS, session=name),
        lambda: server.post(f"{SESSIONS}/{name}/append", text="a"),
        lambda: server.client.delete(f"{SESSIONS}/{name}"),
    ):
        assert refused(call()) == (409, "session_in_use")
    assert made(server.post(f"{SESSIONS}/{name}/fork"))["tokens"] == session["tokens"]
    connection.close()
    until(lambda: scheduler.active == 0)
    until(lambda: server.post(f"{SESSIONS}/{name}/append", text="").status_code == 200)
    found = server.client.get(f"{SESSIONS}/{name}").json()
    assert found == {**session, "bytes": found["bytes"], "given": found["given"]}


def test_what_is_no_session_is_told(server: Served) -> None:
    name = made(server.post(SESSIONS))["id"]
    state = server.client.get(f"{SESSIONS}/{name}/state").content
    files = {b"noise": STATE_FILE, state[:-9]: STATE_FILE, b"": STATE_FILE, b"\xff": TEXT_FILE, b"a\0": TEXT_FILE}
    for data, headers in files.items():
        answer = server.client.post(SESSIONS, content=data, headers=headers)
        assert answer.status_code == 400 and str(server.service.sessions.store.folder.path) not in answer.text
    assert refused(server.post(COMPLETIONS, session=name, n=2)) == (400, "invalid_value")
    assert refused(server.post(COMPLETIONS, session=name, prompt=["a", "b"])) == (400, "invalid_value")
    assert refused(server.post(COMPLETIONS, max_tokens=1)) == (400, "invalid_value")
    assert refused(server.post(f"{SESSIONS}/{name}/fork", text="a")) == (400, "unknown_parameter")
    for path in (COMPLETIONS, "/v1/score", f"{SESSIONS}/{name}/fork"):
        assert server.client.post(path, content=b"a", headers=TEXT_FILE).status_code == 415
    assert len(server.client.get(SESSIONS).json()["data"]) == 1
    (server.service.sessions.store.folder.path / f"{name}.session").write_bytes(b"damaged")
    made(server.post(SESSIONS, text="a"))  # which lets the other one sleep
    assert refused(server.post(COMPLETIONS, session=name)) == (410, "session_damaged")
    assert "lmlong_sessions 2.0" in server.client.get("/metrics").text


def test_a_session_whose_file_was_removed_is_gone(server: Served) -> None:
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
        name = made(server.post(SESSIONS, text="abc"))["id"]
        (store.folder.path / f"{name}.session").unlink()
        assert refused(call(name)) == (404, "session_not_found")
        assert name not in {one["id"] for one in server.client.get(SESSIONS).json()["data"]}
        assert (store.folder.bytes, store.folder.count) == before


def test_a_full_disk_is_told_and_leaves_nothing(server: Served) -> None:
    session = made(server.post(SESSIONS, text=BOOK))
    state = server.client.get(f"{SESSIONS}/{session['id']}/state").content
    folder = server.service.sessions.store.folder.path
    there = sorted(folder.iterdir())
    with largest_file(300):
        answers = (
            server.post(SESSIONS, text=BOOK),
            server.client.post(SESSIONS, content=state, headers=STATE_FILE),
            server.post(f"{SESSIONS}/{session['id']}/append", text="abac"),
            server.post(COMPLETIONS, session=session["id"], **GREEDY),
        )
    for answer in answers:
        assert refused(answer) == (507, "insufficient_storage"), answer.text
        assert str(folder) not in answer.text
    assert sorted(folder.iterdir()) == there
    assert server.client.get(f"{SESSIONS}/{session['id']}").json() == session
