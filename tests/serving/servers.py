"""Servers in a thread, on free ports, and their clients."""

import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
from starlette.applications import Starlette

from lmlong.inference.loading import TrainedLanguageModel
from lmlong.serving.app import ModelServer, make_app
from lmlong.serving.guard import Hosts
from lmlong.serving.server import Server, bind
from lmlong.serving.session_store import SessionStore
from lmlong.serving.settings import Settings

NAME = "tiny"
COMPLETIONS, CHAT, SCORE, SESSIONS = "/v1/completions", "/v1/chat/completions", "/v1/score", "/v1/sessions"
JSON = {"Content-Type": "application/json"}
TEXT_FILE = {"Content-Type": "application/octet-stream"}
STATE_FILE = {"Content-Type": "application/vnd.lmlong.state"}


@dataclass
class Served:
    """A server, and a client of it."""

    port: int
    service: ModelServer
    client: httpx.Client
    server: Server

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.client.post(path, json=body)

    def get(self, path: str) -> Any:
        return answered(self.client.get(path))

    def completion(self, **body: Any) -> dict[str, Any]:
        return answered(self.post(COMPLETIONS, **body))

    def texts(self, **body: Any) -> list[str]:
        """The texts of a completion."""
        return [choice["text"] for choice in self.completion(**body)["choices"]]

    def session(self, text: str, **options: Any) -> dict[str, Any]:
        """A new session that has read a text."""
        return answered(self.post(SESSIONS, text=text, **options), 201)

    def upload(self, data: bytes, headers: dict[str, str], path: str = SESSIONS) -> httpx.Response:
        return self.client.post(path, content=data, headers=headers)

    def events(self, path: str, **body: Any) -> list[dict[str, Any]]:
        """The events of a stream, which ends as OpenAI's do."""
        with self.client.stream("POST", path, json={**body, "stream": True}) as answer:
            assert answer.status_code == 200, answer.read()
            assert answer.headers["content-type"].startswith("text/event-stream")
            lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: ")]
        assert lines.pop() == "[DONE]"
        return [json.loads(line) for line in lines]


@contextmanager
def served(
    trained: TrainedLanguageModel,
    hosts: Hosts | None = None,
    store: SessionStore | None = None,
    key: str | None = None,
    **changed: Any,
) -> Iterator[Served]:
    """Serve a model until the block ends; `changed` are settings."""
    settings = Settings(**{"grace": 0.1, "memory": 0, **changed})
    with TemporaryDirectory() as folder:
        store = store or SessionStore(trained, Path(folder), settings)
        app = make_app(trained, NAME, store, settings, hosts or Hosts("127.0.0.1"), key)
        with running(app, settings) as (client, server):
            yield Served(client.base_url.port or 80, app.state.service, client, server)


@contextmanager
def running(app: Starlette, settings: Settings) -> Iterator[tuple[httpx.Client, Server]]:
    """Run an application until the block ends; a client of it, and its server."""
    listening, begun = bind("127.0.0.1", 0), threading.Event()
    server = Server(app, listening, settings.grace, begun.set)
    thread = threading.Thread(target=server.serve_until_signal, daemon=True)
    thread.start()
    assert begun.wait(60)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{listening.getsockname()[1]}", timeout=60) as client:
            yield client, server
    finally:
        server.should_exit = True
        thread.join(60)
        assert not thread.is_alive()


def answered(answer: httpx.Response, status: int = 200) -> Any:
    assert answer.status_code == status, answer.text
    return answer.json()


def error_of(answer: httpx.Response) -> dict[str, Any]:
    """The error of an answer, which names no file of the server."""
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert "/" not in re.sub(r"/v1/(chat/)?|(application|text|multipart)/[\w-]+", "", error["message"]), "a path"
    return error


def refused(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, error_of(answer)["code"]


def until(holds: Callable[[], bool], seconds: float = 30.0) -> None:
    """Wait until something holds."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it never came to hold"
        time.sleep(0.01)
