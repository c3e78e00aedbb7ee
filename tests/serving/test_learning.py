"""Texts that the served model learns from, and sessions that begin to learn."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from serving.schedulers import tiny
from serving.servers import COMPLETIONS, SCORE, SESSIONS, STATE_FILE, TEXT_FILE, Served, answered, error_of, served

from lmlong.inference.loading import TrainedLanguageModel

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 40}
TEXT = "A line of unknown words: zyx qwv. " * 12
MORE = "Another zyx, and another qwv! " * 6


@pytest.fixture(scope="module")
def trained() -> TrainedLanguageModel:
    return tiny("elu", native=True)


@pytest.fixture(scope="module")
def server(trained: TrainedLanguageModel) -> Iterator[Served]:
    with served(trained) as server:
        yield server


def text_after(trained: TrainedLanguageModel, *, learn: bool) -> str:
    """What the model writes after TEXT without a server."""
    return "".join(replace(trained, learn=learn).stream(TEXT, **GREEDY))


@pytest.mark.parametrize("default", [False, True], ids=["plain", "learning"])
def test_a_server_learns_from_a_text_as_asked_or_as_it_was_started(
    trained: TrainedLanguageModel, default: bool
) -> None:
    expected = {learn: text_after(trained, learn=learn) for learn in (False, True)}
    assert expected[False] != expected[True]
    bits: dict[bool | None, float] = {}
    with served(replace(trained, learn=default)) as server:
        assert server.get("/v1/models")["data"][0]["learns"] is default
        for learn in (None, False, True):
            learns = default if learn is None else learn
            assert server.texts(prompt=TEXT, n=2, learn=learn, **GREEDY) == [expected[learns]] * 2
            bits[learn] = answered(server.post(SCORE, text=TEXT, learn=learn))["bits"]
            session = server.session(TEXT, learn=learn)
            server.session("another, which takes its place in memory")
            answer = server.completion(session=session["id"], **GREEDY)
            assert session["learns"] is answer["session"]["learns"] is learns
            assert answer["choices"][0]["text"] == expected[learns]
    assert bits[None] == bits[default] and bits[False] > 1.05 * bits[True]


def test_a_session_begins_to_learn_and_does_not_stop(server: Served, trained: TrainedLanguageModel) -> None:
    root = server.session(TEXT)
    append = f"{SESSIONS}/{root['id']}/append"
    assert answered(server.post(append, text=""))["learns"] is False
    grown = answered(server.post(append, text=MORE, learn=True))
    assert grown["learns"] is True and grown["state_bytes"] > root["state_bytes"] + 30_000
    fork = answered(server.post(f"{SESSIONS}/{root['id']}/fork"), 201)
    assert fork["learns"] is True
    for path, body in ((append, {"text": "a"}), (COMPLETIONS, {"session": root["id"]})):
        answer = server.post(path, **body, learn=False)
        assert answer.status_code == 400 and error_of(answer)["param"] == "learn"
        assert "learns until its end" in error_of(answer)["message"]
    model = replace(trained, learn=True)
    expected = "".join(model.stream("", state=model.read(MORE, trained.read(TEXT)), **GREEDY))
    for name, options in ((root["id"], {"learn": True}), (fork["id"], {})):
        answer = server.completion(session=name, **options, **GREEDY)
        assert answer["session"]["learns"] is True
        assert answer["choices"][0]["text"] == expected


def test_uploads_are_learned_from_as_asked(server: Served, trained: TrainedLanguageModel) -> None:
    plain, book = (
        answered(server.upload(TEXT.encode(), TEXT_FILE, f"{SESSIONS}?learn={learn}"), 201)
        for learn in ("false", "true")
    )
    assert (plain["learns"], book["learns"]) == (False, True)
    state = server.client.get(f"{SESSIONS}/{book['id']}/state").content
    assert error_of(server.upload(state, STATE_FILE, f"{SESSIONS}?learn=false"))["param"] == "learn"
    again = answered(server.upload(state, STATE_FILE), 201)
    assert again["learns"] is True and again["tail"] == book["tail"]
    assert server.texts(session=again["id"], **GREEDY) == [text_after(trained, learn=True)]
