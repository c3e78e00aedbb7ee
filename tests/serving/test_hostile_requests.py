"""Requests and clients as nobody wishes them: each gets an answer, and none of them harms the others."""

import gc
import http.client
import json
import random
import re
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from itertools import islice
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving.chats import chatting
from serving.request_draws import ENDLESS, connections, requests
from serving.schedulers import tiny
from serving.servers import (
    CHAT,
    COMPLETIONS,
    JSON,
    SCORE,
    SESSIONS,
    STATE_FILE,
    TEXT_FILE,
    Served,
    error_of,
    refused,
    served,
    until,
)

from lmlong.data.formats.table import SUFFIXES
from lmlong.inference.loading import TrainedLanguageModel
from lmlong.serving.guard import Hosts, warning
from lmlong.serving.server import ACCEPTED, LONGEST_READ, WAITING, Connection
from lmlong.serving.writer import Writer

POST_HEAD = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\n".encode()
NO_SESSION = f"{SESSIONS}/{'0' * 24}"
TEN_BYTES = b" " * 10


def typed(media_type: str | None) -> dict[str, str]:
    return {} if media_type is None else {"Content-Type": media_type}


HOSTILE: list[tuple[str, str, dict[str, str], bytes, int, str | None]] = [
    *(
        ("GET", "/v1/models", {"Host": name}, b"", 421, "unknown_host")
        for name in ("evil.example", "evil.example:80", "127.0.0.1.evil.example", "", "0.0.0.0", "[::2]")
    ),
    *(
        ("POST", path, typed(media_type), b'{"prompt": "a"}', 415, "unsupported_media_type")
        for path in (COMPLETIONS, SESSIONS, f"{SESSIONS}/name/append")
        for media_type in (None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data")
    ),
    *(("POST", path, TEXT_FILE, b"a", 415, "unsupported_media_type") for path in (COMPLETIONS, SCORE, CHAT)),
    *(("POST", f"{NO_SESSION}/fork", headers, b"", 404, "session_not_found") for headers in ({}, JSON)),
    ("POST", f"{NO_SESSION}/fork", {}, b'{"text": "a"}', 400, "unknown_parameter"),
    ("POST", f"{NO_SESSION}/fork", TEXT_FILE, b"a", 415, "unsupported_media_type"),
    *(("OPTIONS", path, {"Origin": "http://evil.example"}, b"", 405, None) for path in (COMPLETIONS, SESSIONS)),
    *(("GET", path, {}, b"", 404, None) for path in ("/page", "/page/../app.py", "/page/__init__.py")),
    ("POST", "/", JSON, b"", 405, None),
    ("POST", "/v1/embeddings", JSON, b"", 404, None),
    ("GET", COMPLETIONS, {}, b"", 405, None),
    *(("POST", path, JSON, TEN_BYTES, 413, "body_too_large") for path in ("/health", "/")),
    *(("GET", path, JSON, TEN_BYTES, 413, "body_too_large") for path in ("/ready", "/v1/models")),
    ("POST", COMPLETIONS, JSON, b'{"promt": "a"}', 400, "unknown_parameter"),
    ("POST", COMPLETIONS, JSON, b'{"prompt": "a", "model": "other"}', 404, "model_not_found"),
    *(("GET", f"/v1/models/{name}", {}, b"", 404, "model_not_found") for name in ("", "other")),
    *((method, NO_SESSION, {}, b"", 404, "session_not_found") for method in ("GET", "DELETE")),
    *(("GET", f"{NO_SESSION}/{what}", {}, b"", 404, "session_not_found") for what in ("state", "text")),
    ("GET", f"{NO_SESSION}/text?logprobs=21", {}, b"", 400, "invalid_value"),
    ("GET", f"{SESSIONS}?limit=0", {}, b"", 400, "invalid_value"),
    ("POST", f"{NO_SESSION}/append", JSON, b'{"text": "a"}', 404, "session_not_found"),
    ("POST", f"{NO_SESSION}/fork", JSON, b'{"text": "a"}', 400, "unknown_parameter"),
    ("POST", f"{SESSIONS}?lean=true", TEXT_FILE, b"a", 400, "unknown_parameter"),
    ("POST", SESSIONS, TEXT_FILE, b"\xff", 400, None),
    ("POST", f"{SESSIONS}?stream=true", TEXT_FILE, b"a\0", 400, None),
    *(("POST", SESSIONS, STATE_FILE, data, 400, "invalid_state") for data in (b"", b"noise")),
]
"""Requests with the status and the code of the answer."""


@pytest.fixture(scope="module")
def trained() -> TrainedLanguageModel:
    trained = tiny("ngram", native=True)
    assert len("".join(trained.stream("a", temperature=0, max_tokens=1000))) > 200
    return trained


@pytest.fixture(scope="module")
def server(trained: TrainedLanguageModel) -> Iterator[Served]:
    with served(trained, max_tokens=10**6, lag=1 << 40) as server:
        yield server


def unfinished(server: Served, begun: bytes, size: int) -> http.client.HTTPConnection:
    """A completion whose body of `size` bytes has only begun."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.putrequest("POST", COMPLETIONS)
    for name, value in {**JSON, "Content-Length": str(size)}.items():
        connection.putheader(name, value)
    connection.endheaders(begun)
    return connection


@pytest.mark.parametrize(("method", "path", "headers", "body", "status", "code"), HOSTILE)
def test_a_hostile_request_is_refused(
    server: Served, method: str, path: str, headers: dict[str, str], body: bytes, status: int, code: str | None
) -> None:
    content = iter([body]) if body == TEN_BYTES else body  # of no known size
    answer = server.client.request(method, path, headers=headers, content=content)
    assert refused(answer) == (status, code)
    assert not [name for name in answer.headers if name.startswith("access-control")]
    assert str(server.service.sessions.store.folder.path) not in answer.text
    assert server.get(SESSIONS)["data"] == []
    assert server.client.get("/ready").status_code == 200


def test_a_wrong_media_type_is_told_with_the_right_one(server: Served) -> None:
    assert error_of(server.upload(b"a text", typed("text/plain")))["message"] == (
        "Content-Type is text/plain. For a file, send application/octet-stream, for example by "
        "curl -H 'Content-Type: application/octet-stream' --data-binary @FILE; for JSON, application/json."
    )
    assert not {"text/plain", "application/x-www-form-urlencoded", "multipart/form-data"} & SUFFIXES.keys()


def test_an_unknown_path_is_told_those_that_exist(server: Served) -> None:
    message = error_of(server.client.get("/v1/complete"))["message"]
    assert message.startswith("Path not found. ") and {COMPLETIONS, CHAT, SCORE, SESSIONS} <= set(
        re.split("[ ,.]", message)
    )


def test_who_has_no_key_is_told_nothing(trained: TrainedLanguageModel) -> None:
    with served(trained, key="secret") as server:
        for key in (None, "Bearer", "Bearer wrong", "secret", "Bearer secrets", "Bearer \xff", "Basic secret"):
            headers = {} if key is None else {"Authorization": key.encode("latin-1")}
            for method, path in (("GET", "/v1/models"), ("POST", COMPLETIONS), ("GET", "/metrics"), ("GET", "/none")):
                answer = server.client.request(method, path, headers=headers)  # type: ignore[arg-type]
                assert refused(answer) == (401, "invalid_api_key")
        right = {"Authorization": "Bearer secret"}
        assert server.client.get("/v1/models", headers=right).status_code == 200
        assert server.client.post(COMPLETIONS, headers=right, json={"prompt": "a"}).status_code == 200
        assert server.client.get("/health").status_code == server.client.get("/ready").status_code == 200


def test_names_of_a_server_follow_from_where_it_listens() -> None:
    everywhere = Hosts("0.0.0.0", ["Box.example"])
    for name in ("localhost:1", "box.example:8000", "10.1.2.3", "[fe80::1]:9", socket.gethostname()):
        assert name in everywhere
    assert "evil.example" not in everywhere and "10.1.2.3.evil.example" not in everywhere
    for name in ("localhost", "LOCALHOST:80", "127.0.0.1", "[::1]:80"):
        assert name in Hosts("127.0.0.1")
    assert "10.1.2.3" in Hosts("10.1.2.3") and "10.1.2.4" not in Hosts("10.1.2.3")
    assert "localhost" not in Hosts("10.1.2.3")
    assert warning(everywhere, "0.0.0.0", None) and not warning(everywhere, "0.0.0.0", "key")
    assert not warning(Hosts("127.0.0.5"), "127.0.0.5", None)


def test_bodies_are_limited_one_by_one_and_together(trained: TrainedLanguageModel) -> None:
    with served(trained, max_body=100, held=150) as server:

        def send(content: Any) -> httpx.Response:
            return server.client.post(COMPLETIONS, content=content, headers=JSON)

        assert send(b" " * 101).status_code == 413
        assert refused(send(iter([b" "] * 101))) == (413, "body_too_large")  # of no known size
        assert send(b" " * 100).status_code == 400

        slow = unfinished(server, b" " * 99, 100)
        for _ in range(9):  # by then the server has read it; beside another body, it would itself be refused
            server.client.get("/health")
        until(lambda: send(b" " * 60).status_code == 429)
        answer = send(b" " * 60)
        assert error_of(answer)["type"] == "rate_limit_error" and answer.headers["retry-after"]
        slow.send(b" ")
        assert slow.getresponse().status == 400
        assert send(b" " * 60).status_code == 400, "the memory is free again"


def test_too_many_connections_are_turned_away(trained: TrainedLanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmlong.serving.server.connection_limits", lambda: (3, 16))
    with served(trained) as server, ExitStack() as opened:
        address = ("127.0.0.1", server.port)
        for _ in range(2):
            opened.enter_context(socket.create_connection(address))
        until(lambda: httpx.get(f"{server.url}/health").status_code == 503)
        opened.enter_context(socket.create_connection(address))
        fourth = opened.enter_context(socket.create_connection(address, timeout=20))
        with suppress(ConnectionResetError):
            assert fourth.recv(1) == b""
        opened.close()
        until(lambda: httpx.get(f"{server.url}/health").status_code == 200)


def test_other_connections_have_their_turn_between_tiny_chunks(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """43,000 chunks of a byte take a second to parse."""
    read, receive = [], Connection.data_received
    monkeypatch.setattr(Connection, "data_received", lambda self, data: (read.append(len(data)), receive(self, data)))
    head = POST_HEAD + b"Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(head + b"1\r\n[\r\n" * 10_000 + b"0\r\n\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 400 ")
    assert sum(read) > 60_000 and max(read) <= LONGEST_READ


@pytest.mark.skipif(sys.platform != "linux", reason="reads the length of Linux's queue")
def test_a_burst_of_connections_waits_in_the_queue(server: Served) -> None:
    (listening,) = (each for one in server.server.servers for each in one.sockets)
    state = listening.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)
    most = int(Path("/proc/sys/net/core/somaxconn").read_text())
    assert int.from_bytes(state[28:32], sys.byteorder) == min(WAITING, most) > ACCEPTED


def test_no_body_makes_the_server_fail_or_hang(tmp_path: Path) -> None:
    statuses: dict[int, int] = {}
    with served(chatting(tmp_path), max_tokens=3, rows=4) as server:
        for path, body in islice(requests(random.Random(0)), 250):
            answer = server.client.post(path, content=body, headers=JSON, timeout=20)
            assert answer.status_code in (200, 201, 400, 404), (body[:200], answer.text)
            statuses[answer.status_code] = statuses.get(answer.status_code, 0) + 1
            if answer.status_code > 201:
                error_of(answer)
        assert statuses[200] > 20 and statuses[400] > 100
        assert server.service.scheduler.counts.failed == 0
        assert server.texts(prompt="still there", max_tokens=3)


def test_no_bytes_make_the_server_fail(server: Served) -> None:
    answered = 0
    for bytes_sent in islice(connections(random.Random(0)), 40):
        with socket.create_connection(("127.0.0.1", server.port), timeout=0.1) as connection:
            with suppress(BrokenPipeError, ConnectionResetError):
                connection.sendall(bytes_sent)
            with suppress(TimeoutError, ConnectionResetError):  # there may be more to come
                answer = connection.recv(1 << 16)
                assert not answer.startswith(b"HTTP/1.1 5"), (bytes_sent, answer)
                answered += answer.startswith(b"HTTP/1.1 4")
    assert answered > 3 and server.texts(prompt="still there", max_tokens=3)


@pytest.mark.parametrize(
    "bytes_sent",
    [
        b"\x16\x03\x01\x02\x00" * 20,
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET /v1/models HTTP/1.0\r\n\r\n",
        b"POST " + b"a" * 200_000,
        POST_HEAD + b"Transfer-Encoding: chunked\r\n\r\nno size\r\n",
    ],
    ids=["TLS", "no host", "an old version", "an endless line", "no HTTP in the body"],
)
def test_what_is_no_request_is_turned_away_once(
    server: Served, bytes_sent: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    answer = b""
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        connection.sendall(bytes_sent)
        with suppress(ConnectionResetError):
            while more := connection.recv(1 << 16):
                answer += more
    assert answer.startswith((b"HTTP/1.1 400", b"HTTP/1.1 421")) and answer.count(b"HTTP/1.1 ") == 1, answer
    assert server.client.get("/health").status_code == 200
    assert not caplog.records


@pytest.mark.parametrize("stream", [True, False])
def test_the_row_of_a_client_that_left_is_free_at_once(server: Served, stream: bool) -> None:
    scheduler, before = server.service.scheduler, server.service.scheduler.counts.cancelled
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.request("POST", COMPLETIONS, json.dumps({**ENDLESS, "n": 3, "stream": stream}), JSON)
    until(lambda: scheduler.active == 3)
    if stream:
        assert connection.getresponse().read(10)
    connection.sock.close() if connection.sock else None
    connection.close()
    until(lambda: scheduler.active == 0)
    assert scheduler.counts.cancelled == before + 3


def leave(server: Served) -> None:
    """Go away while a text is written."""
    with server.client.stream("POST", COMPLETIONS, json=ENDLESS) as stream:
        assert next(stream.iter_lines())


def writers() -> int:
    return sum(type(one) is Writer for one in gc.get_objects())


@pytest.mark.parametrize(
    "ask",
    [
        lambda server: server.texts(prompt=["a", "b"], n=2, max_tokens=3),
        lambda server: server.events(COMPLETIONS, prompt="a", max_tokens=3),
        leave,
    ],
    ids=["whole", "stream", "left"],
)
def test_a_request_that_has_ended_leaves_no_memory_to_collect(server: Served, ask: Callable[[Served], Any]) -> None:
    gc.collect()
    gc.disable()
    try:
        ask(server)
        until(lambda: server.service.scheduler.active == 0)
        until(lambda: writers() == 0)
    finally:
        gc.enable()


def test_a_reader_that_is_too_slow_is_let_go(trained: TrainedLanguageModel) -> None:
    with served(trained, max_tokens=10**6, lag=20_000) as server, socket.socket() as connection:
        scheduler = server.service.scheduler
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(60)
        connection.connect(("127.0.0.1", server.port))
        body = json.dumps({**ENDLESS, "logprobs": 20}).encode()
        head = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(POST_HEAD + head.encode() + body)
        until(lambda: scheduler.counts.cancelled == 1, 60)
        until(lambda: scheduler.active == 0)
        received = b""
        while b"slow_reader" not in received[-2000:]:
            received += (more := connection.recv(1 << 16))
            assert more
        assert server.client.get("/health").status_code == 200


def test_tokens_that_come_together_leave_together(server: Served) -> None:
    begun, events = time.monotonic(), 0
    with server.client.stream("POST", COMPLETIONS, json=ENDLESS) as answer:
        for line in answer.iter_lines():
            events += line.startswith("data: ")
            if time.monotonic() - begun > 0.5:
                break
    until(lambda: server.service.scheduler.active == 0)
    assert 1 < events <= 0.5 / 0.02 + 5


def test_a_body_and_a_request_take_no_longer_than_they_may(trained: TrainedLanguageModel) -> None:
    with served(trained, max_tokens=10**6, timeout=0.3) as server:
        late = unfinished(server, b"{", 100).getresponse()
        assert late.status == 408 and json.loads(late.read())["error"]["code"] == "timeout"
        assert refused(server.post(COMPLETIONS, **{**ENDLESS, "stream": False})) == (504, "timeout")
        with server.client.stream("POST", COMPLETIONS, json=ENDLESS) as stream:
            *_, last = (line for line in stream.iter_lines() if line)
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "timeout"
        until(lambda: server.service.scheduler.active == 0)


def test_one_who_comes_when_all_places_are_taken_is_told_to_wait(trained: TrainedLanguageModel) -> None:
    with served(trained, rows=1, waiting=2, max_tokens=10**6, lag=1 << 40) as server, ExitStack() as streams:
        scheduler = server.service.scheduler
        for count in range(3):
            last = streams.enter_context(server.client.stream("POST", COMPLETIONS, json=ENDLESS))
            until(lambda count=count: (scheduler.active, scheduler.queued) == (1, count))  # type: ignore[misc]
        answer = server.post(COMPLETIONS, prompt="a")
        assert answer.status_code == 429 and int(answer.headers["retry-after"]) > 0
        assert error_of(answer)["type"] == "rate_limit_error"
        last.close()
        until(lambda: scheduler.queued == 1)
        assert server.post(COMPLETIONS, prompt="a", n=2, stream=True).status_code == 429, "before the stream begins"
        until(lambda: scheduler.queued == 1)  # the first of the two has not kept its place
        streams.close()
        until(lambda: (scheduler.active, scheduler.queued) == (0, 0))
        assert server.texts(prompt="a", max_tokens=1)


def test_a_server_that_ends_finishes_what_it_does_and_takes_nothing_more(trained: TrainedLanguageModel) -> None:
    """What takes longer than the grace is told so: see the tests of the command."""
    with served(trained, grace=300, max_tokens=10**6) as server:
        late = unfinished(server, b'{"prompt": ', 15)
        with server.client.stream("POST", COMPLETIONS, json={**ENDLESS, "max_tokens": 3000}) as stream:
            lines = stream.iter_lines()
            assert next(lines)
            server.server.should_exit = True
            until(lambda: server.service.closing)
            late.send(b'"a"}')
            answer = late.getresponse()
            assert answer.status == 503 and json.loads(answer.read())["error"]["code"] == "shutting_down"
            with pytest.raises(httpx.ConnectError):
                httpx.get(f"{server.url}/health")
            *_, last = (line for line in lines if line)
        assert last == "data: [DONE]"


def test_a_failure_of_the_model_is_told_without_its_words(
    trained: TrainedLanguageModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("/secret/path of a prompt")

    with served(trained) as server:
        monkeypatch.setattr("lmlong.inference.state_table.read_tokens", fail)
        answer = server.post(COMPLETIONS, prompt="my words")
        assert answer.status_code == 500 and error_of(answer)["code"] == "internal_error"
        events = server.client.post(COMPLETIONS, json={"prompt": "my words", "stream": True}).text
        assert "internal_error" in events
        monkeypatch.undo()
        assert server.texts(prompt="a", max_tokens=1)
    assert "RuntimeError" in caplog.text and "in fail" in caplog.text
    for told in (answer.text, events, caplog.text):
        assert "secret" not in told and "my words" not in told
