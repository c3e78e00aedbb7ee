"""The text of a session over HTTP, and completions that fork a session."""

from collections.abc import Iterator
from typing import Any

import pytest
from serving.schedulers import subwords, tiny
from serving.servers import Served, served, until

SESSIONS, COMPLETIONS = "/v1/sessions", "/v1/completions"
OPTIONS: dict[str, Any] = {"seed": 1, "max_tokens": 30, "logprobs": 3}


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served(tiny("ngram", native=True, tokenizer=subwords()), max_tokens=10**6) as server:
        yield server


def passages(server: Served, name: str, query: str = "?logprobs=3") -> list[dict[str, Any]]:
    answer = server.client.get(f"{SESSIONS}/{name}/text{query}")
    assert answer.status_code == 200, answer.text
    assert (answer.json()["id"], answer.json()["object"]) == (name, "session.text")
    return answer.json()["passages"]


def whole_text(server: Served, name: str) -> str:
    """The texts of a session and of those that it was forked from."""
    parent = server.client.get(f"{SESSIONS}/{name}").json()["parent"]
    own = "".join(passage["text"] for passage in passages(server, name, ""))
    return (whole_text(server, parent) if parent else "") + own


def forked(server: Served, name: str, prompt: str, **options: Any) -> dict[str, Any]:
    answer = server.post(COMPLETIONS, session=name, fork=True, prompt=prompt, **{**OPTIONS, **options})
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_text_of_forks_is_what_was_given_and_generated(server: Served) -> None:
    texts = {server.post(SESSIONS, text=text).json()["id"]: text for text in ("", "b", "bad cab" * 100)}
    for prompt in (" dab", "", "a", ""):
        for parent, before in [*texts.items()][-3:]:
            answer = forked(server, parent, prompt)
            session, written = answer["session"], answer["choices"][0]["text"]
            texts[session["id"]] = before + prompt + written
            assert session["parent"] == parent
            assert server.client.get(f"{SESSIONS}/{session['id']}").json() == session
            assert session["given"] + session["written"] == (prompt + written)[:80] or len(written) > 40
    for name, text in texts.items():
        assert whole_text(server, name) == text


def test_text_continues_at_every_character(server: Served) -> None:
    text = "abacad cab, bad dab"
    for end in range(1, len(text)):
        name = server.post(SESSIONS, text=text[:end]).json()["id"]
        for prompt in (text[end:], "\n"):
            answer = forked(server, name, prompt, max_tokens=1)
            assert whole_text(server, answer["session"]["id"]) == text[:end] + prompt + answer["choices"][0]["text"]


def test_stream_creates_one_session(server: Served) -> None:
    before = len(server.client.get(SESSIONS).json()["data"])
    root = server.post(SESSIONS, text="bad cab").json()["id"]
    first, *_, last = server.events(COMPLETIONS, session=root, fork=True, prompt=" dab", **OPTIONS)
    assert first["session"] == {"id": last["session"]["id"], "object": "session"} and first["choices"] == []
    until(lambda: server.service.scheduler.active == 0)
    forked(server, root, "")  # after what the server does once a stream has ended
    assert len(server.client.get(SESSIONS).json()["data"]) == before + 3
    assert server.client.get(f"{SESSIONS}/{last['session']['id']}").json() == last["session"]


def test_likelihoods_are_those_of_the_generation(server: Served) -> None:
    root = server.post(SESSIONS, text="bad cab").json()["id"]
    for learn in (False, True):
        answer = forked(server, root, " dab " * 20, learn=learn)
        given, written = passages(server, answer["session"]["id"])
        assert (given["by"], given["logprobs"], written["by"]) == ("reader", None, "model")
        expected = answer["choices"][0]["logprobs"]
        assert written["logprobs"]["tokens"] == expected["tokens"]
        assert written["logprobs"]["token_logprobs"] == pytest.approx(expected["token_logprobs"], abs=1e-5)
        for found, wanted in zip(written["logprobs"]["top_logprobs"], expected["top_logprobs"], strict=True):
            assert found == pytest.approx(wanted, abs=1e-5)
        assert passages(server, answer["session"]["id"], "")[-1]["logprobs"] is None


def test_text_of_an_uploaded_state_is_its_end(server: Served) -> None:
    name = server.post(SESSIONS, text="bad cab, dab").json()["id"]
    state = server.client.get(f"{SESSIONS}/{name}/state").content
    headers = {"Content-Type": "application/vnd.lmlong.state"}
    uploaded = server.client.post(SESSIONS, content=state, headers=headers).json()["id"]
    assert passages(server, uploaded) == [{"by": "state", "text": "bad cab, dab", "logprobs": None}]
    answer = forked(server, uploaded, " ad")
    assert whole_text(server, answer["session"]["id"]) == "bad cab, dab ad" + answer["choices"][0]["text"]


def test_fork_that_is_disconnected_keeps_what_was_generated(server: Served) -> None:
    root = server.post(SESSIONS, text="bad cab").json()["id"]
    body = {"session": root, "fork": True, "prompt": " dab", "stream": True, "max_tokens": 10**6, "ignore_eos": True}
    with server.client.stream("POST", COMPLETIONS, json=body) as answer:
        events = (line for line in answer.iter_lines() if line.startswith("data: "))
        name = next(events).split('"session":{"id":"')[1][:24]
        for _ in range(5):
            next(events)
    until(lambda: server.client.get(f"{SESSIONS}/{name}").status_code == 200)
    given, written = passages(server, name)
    assert given["text"] == " dab" and len(written["text"]) >= 5 and written["by"] == "model"
    assert server.client.get(f"{SESSIONS}/{root}").json()["tokens"] < 10, "the session itself is as before"


def test_fork_without_session_is_refused(server: Served) -> None:
    answer = server.post(COMPLETIONS, prompt="a", fork=True)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "fork"
    assert server.client.get(f"{SESSIONS}/{'0' * 24}/text").status_code == 404
    name = server.post(SESSIONS, text="bad").json()["id"]
    for query in ("?logprobs=21", "?logprobs=-1", "?logprobs=x", "?lines=1"):
        assert server.client.get(f"{SESSIONS}/{name}/text{query}").status_code == 400
