"""Connections on which nothing arrives are closed, and never keep other clients out."""

import http.client
import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from serving.engines import tiny
from serving.request_draws import ENDLESS, PATH
from serving.servers import Served, served, until

from lmlong.serving.connections import ConnectionLimits, open_files

GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
NEVER = 1e9


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check connections ten times a second, not once."""
    monkeypatch.setattr("lmlong.serving.server.TICKS_A_SECOND", 1)


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


def connect(server: Served, opened: ExitStack, data: bytes = b"", **options: int) -> socket.socket:
    connection = opened.enter_context(socket.socket())
    for name, value in options.items():
        connection.setsockopt(socket.SOL_SOCKET, getattr(socket, name), value)
    connection.settimeout(60)
    connection.connect(("127.0.0.1", server.port))
    connection.sendall(data)
    return connection


def received(connection: socket.socket) -> bytes:
    """All that comes until the server closes the connection."""
    data = b""
    try:
        while more := connection.recv(1 << 16):
            data += more
    except ConnectionResetError:
        pass
    return data


def test_a_connection_without_a_request_is_closed(opened: ExitStack) -> None:
    sent = {
        "nothing": (b"", 0),
        "half a head": (GET, 0),
        "half of the second head": (GET + b"\r\n" + GET, 1),
        "an empty line after a request": (GET + b"\r\n\r\n", 1),
    }
    with served(tiny(), connections=ConnectionLimits(head=0.5, body=NEVER)) as server:
        connections = {name: connect(server, opened, data) for name, (data, _) in sent.items()}
        with server.client.stream("POST", PATH, json={**ENDLESS, "max_tokens": 300}) as stream:
            *_, last = filter(None, stream.iter_lines())  # which takes longer than the head of a request may
        assert last == "data: [DONE]"
        answers = {name: received(each).count(b"HTTP/1.1 200") for name, each in connections.items()}
    assert answers == {name: count for name, (_, count) in sent.items()}


def test_a_body_that_does_not_arrive_ends_its_connection(opened: ExitStack) -> None:
    head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 15\r\n\r\n"
    with served(tiny(), connections=ConnectionLimits(head=NEVER, body=0.3)) as server:
        assert received(connect(server, opened, head.encode() + b'{"prompt"')) == b""


def test_an_answer_that_is_not_read_ends_its_connection(opened: ExitStack) -> None:
    with served(tiny(), connections=ConnectionLimits(head=NEVER, unread=0.3)) as server:
        requests = b"GET /page/style.css HTTP/1.1\r\nHost: localhost\r\n\r\n" * 800
        connection = connect(server, opened, requests, SO_RCVBUF=4096)
        connections = server.server._connections
        until(lambda: not connections._all)
        assert len(received(connection)) > 0 and server.client.get("/health").status_code == 200


def test_silent_connections_make_room_for_others(opened: ExitStack) -> None:
    with served(tiny(), connections=ConnectionLimits(most=4, head=NEVER)) as server:
        silent = [connect(server, opened, GET if number % 2 else b"") for number in range(12)]
        assert server.client.get("/health").status_code == 200
        assert [received(connection) for connection in silent[:8]] == [b""] * 8, "the oldest are closed"
        silent[-1].sendall(b"\r\n")
        assert silent[-1].recv(1 << 16).startswith(b"HTTP/1.1 200"), "the latest are not"


def test_requests_that_go_on_are_not_cut_for_others(opened: ExitStack) -> None:
    with served(tiny(), connections=ConnectionLimits(most=2), max_tokens=10**6, lag=1 << 40) as server:
        streams = []
        for _ in range(2):
            stream = opened.enter_context(server.client.stream("POST", PATH, json=ENDLESS))
            streams.append(stream.iter_lines())
            assert next(streams[-1])
        answer = http.client.HTTPResponse(connect(server, opened, GET + b"\r\n"))
        answer.begin()
        body: dict[str, Any] = json.loads(answer.read())
        assert answer.status == 503 and answer.getheader("Retry-After") and "connections" in body["error"]["message"]
        for stream in streams:
            assert [next(stream) for _ in range(20)]


def test_limits_leave_files_for_other_things() -> None:
    limits = ConnectionLimits.of_process()
    assert limits.most > 0 and limits.most + limits.backlog < open_files()
