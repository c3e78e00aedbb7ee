"""Texts that the served model learns from: alone, in sessions, beside others and after a kill."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving.schedulers import Told, running, tiny
from serving.servers import Served, served

from lmlong.inference.loading import TrainedLanguageModel
from lmlong.inference.sampling import Sampling
from lmlong.inference.session import prefill
from lmlong.inference.state_table import PIECE
from lmlong.model.state import state_bytes
from lmlong.serving.request import Request

SESSIONS, COMPLETIONS, SCORE = "/v1/sessions", "/v1/completions", "/v1/score"
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 40}
STATE_FILE = {"Content-Type": "application/vnd.lmlong.state"}
TEXT_FILE = {"Content-Type": "application/octet-stream"}
TEXT = "A line of unknown words: zyx qwv. " * 12
MORE = "Another zyx, and another qwv! " * 6


@pytest.fixture(scope="module")
def trained() -> TrainedLanguageModel:
    return tiny("elu", native=True)


@pytest.fixture(scope="module")
def server(trained: TrainedLanguageModel) -> Iterator[Served]:
    with served(trained, memory=0) as server:  # all sessions but one are read from their files
        yield server


def text_after(trained: TrainedLanguageModel, *texts: str, learn: bool) -> str:
    """What the model writes after texts that are read one after another, without a server."""
    model, session = replace(trained, learn=learn), None
    for text in texts:
        session = model.read(text, session)
    return "".join(model.stream("", state=session, **GREEDY))


def made(server: Served, text: str, **options: Any) -> dict[str, Any]:
    answer = server.post(SESSIONS, text=text, **options)
    assert answer.status_code == 201, answer.text
    return answer.json()


def continued(server: Served, name: str, prompt: str = "", **options: Any) -> dict[str, Any]:
    answer = server.post(COMPLETIONS, session=name, prompt=prompt, **GREEDY, **options)
    assert answer.status_code == 200, answer.text
    return answer.json()


def refused(answer: httpx.Response) -> str:
    """The field that a refused request has wrong."""
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]["param"]


def is_likely(server: Served, prompt: str, following: str, learn: bool | None) -> bool:
    """Whether the next character is among the 20 likeliest."""
    answer = server.post(COMPLETIONS, prompt=prompt, max_tokens=1, logprobs=20, learn=learn)
    (likeliest,) = answer.json()["choices"][0]["logprobs"]["top_logprobs"]
    return following in likeliest


def test_the_second_half_of_a_text_is_predicted_better(server: Served) -> None:
    text = "abcd efgh " * 40
    ends, choices = range(len(text) // 2, len(text), 17), [None, False, True]
    likely = {learn: sum(is_likely(server, text[:end], text[end], learn) for end in ends) for learn in choices}
    bits = {learn: server.post(SCORE, text=text, learn=learn).json()["bits"] for learn in choices}
    assert likely[None] == likely[False] < len(ends) / 4 and likely[True] > len(ends) / 2
    assert bits[None] == bits[False] > 1.05 * bits[True]


def test_a_prompt_is_continued_as_by_the_library(server: Served, trained: TrainedLanguageModel) -> None:
    expected, plain = text_after(trained, TEXT, learn=True), text_after(trained, TEXT, learn=False)
    assert expected != plain
    assert server.texts(prompt=TEXT, learn=True, **GREEDY) == [expected]
    assert server.texts(prompt=TEXT, n=2, learn=True, **GREEDY) == [expected] * 2
    assert server.texts(prompt=TEXT, **GREEDY) == [plain] == server.texts(prompt=TEXT, learn=False, **GREEDY)


def test_texts_that_learn_and_texts_that_do_not_are_written_together(trained: TrainedLanguageModel) -> None:
    asked = [(TEXT, True), (TEXT, False), (MORE, True), (TEXT[:99], True)]
    with running(trained) as scheduler:
        told = [
            Told(scheduler, Request(text, Sampling(temperature=0), max_tokens=40, learn=learn)) for text, learn in asked
        ]
        written = [each.text() for each in told]
    assert written == [text_after(trained, text, learn=learn) for text, learn in asked]


def test_a_session_learns_and_its_fork_learns_apart(server: Served, trained: TrainedLanguageModel) -> None:
    root = made(server, TEXT, learn=True)
    plain = made(server, TEXT)
    assert (root["learns"], plain["learns"]) == (True, False)
    assert root["state_bytes"] > plain["state_bytes"] + 30_000
    fork = server.post(f"{SESSIONS}/{root['id']}/fork").json()
    assert fork["learns"] is True
    assert server.post(f"{SESSIONS}/{fork['id']}/append", text=MORE).json()["learns"] is True
    answer = continued(server, root["id"])
    assert answer["choices"][0]["text"] == text_after(trained, TEXT, learn=True)
    assert answer["session"]["learns"] is True
    assert continued(server, fork["id"])["choices"][0]["text"] == text_after(trained, TEXT, MORE, learn=True)
    written = text_after(trained, TEXT, learn=False)
    assert continued(server, plain["id"])["choices"][0]["text"] == written


def test_a_session_that_stops_within_a_text_has_learned_from_what_was_told(
    server: Served, trained: TrainedLanguageModel
) -> None:
    """The returned text ends before a stop string, so the session is stepped back to it."""
    written = text_after(trained, TEXT, learn=True)
    session, stop = made(server, TEXT, learn=True), written[25:28]
    answer = continued(server, session["id"], stop=[stop])
    assert answer["choices"][0]["text"] == written[: written.index(stop)]
    model = replace(trained, learn=True)
    generation = model.generate(model.read(TEXT), Sampling(temperature=0), [(0,)], 40, [stop])
    assert "".join(piece for _, piece in generation) == answer["choices"][0]["text"]
    expected = "".join(model.stream(MORE, state=generation.finished(), **GREEDY))
    assert continued(server, session["id"], MORE)["choices"][0]["text"] == expected


def test_a_session_begins_to_learn_and_does_not_stop(server: Served, trained: TrainedLanguageModel) -> None:
    name = made(server, TEXT)["id"]
    assert server.post(f"{SESSIONS}/{name}/append", text="").json()["learns"] is False
    assert server.post(f"{SESSIONS}/{name}/append", text=MORE, learn=True).json()["learns"] is True
    for path, body in (
        (f"{SESSIONS}/{name}/append", {"text": "a", "learn": False}),
        (COMPLETIONS, {"session": name, "learn": False}),
    ):
        answer = server.post(path, **body)
        assert refused(answer) == "learn" and "learns until its end" in answer.json()["error"]["message"]
    answer = continued(server, name, learn=True)
    assert answer["session"]["learns"] is True
    model = replace(trained, learn=True)
    session = model.read(MORE, trained.read(TEXT))
    assert answer["choices"][0]["text"] == "".join(model.stream("", state=session, **GREEDY))


def test_a_server_may_learn_from_all_new_texts(trained: TrainedLanguageModel) -> None:
    with served(replace(trained, learn=True), memory=0) as server:
        assert server.client.get("/v1/models").json()["data"][0]["learns"] is True
        assert server.texts(prompt=TEXT, **GREEDY) == [text_after(trained, TEXT, learn=True)]
        assert server.texts(prompt=TEXT, learn=False, **GREEDY) == [text_after(trained, TEXT, learn=False)]
        assert made(server, TEXT)["learns"] is True
        plain = made(server, TEXT, learn=False)
        assert plain["learns"] is False
        made(server, "another, which takes its place in memory")
        answer = continued(server, plain["id"])
        assert answer["session"]["learns"] is False
        assert answer["choices"][0]["text"] == text_after(trained, TEXT, learn=False)
        metrics = server.client.get("/metrics").text
    with served(trained) as server:
        size = [line for line in metrics.splitlines() if line.startswith("lmlong_row_state_bytes")]
        assert len(size) == 2 and set(size) <= {*server.client.get("/metrics").text.splitlines()}


def test_files_are_learned_from_and_states_are_uploaded(
    server: Served, trained: TrainedLanguageModel, tmp_path: Path
) -> None:
    def upload(content: bytes, query: str = "", headers: dict[str, str] = STATE_FILE) -> httpx.Response:
        return server.client.post(f"{SESSIONS}{query}", content=content, headers=headers)

    book = upload(TEXT.encode(), "?learn=true", TEXT_FILE).json()
    assert book["learns"] is True and upload(TEXT.encode(), "?learn=false", TEXT_FILE).json()["learns"] is False
    state = server.client.get(f"{SESSIONS}/{book['id']}/state").content
    assert refused(upload(state, "?learn=false")) == "learn"
    for query in ("", "?learn=true"):
        again = upload(state, query).json()
        assert again["learns"] is True and again["tail"] == book["tail"]
        assert continued(server, again["id"])["choices"][0]["text"] == text_after(trained, TEXT, learn=True)
    trained.save_state(trained.read(TEXT), tmp_path / "plain.state")
    plain = (tmp_path / "plain.state").read_bytes()
    assert upload(plain).json()["learns"] is False and upload(plain, "?learn=true").json()["learns"] is True


@pytest.mark.parametrize("value", ["output", "bias", "", 1, 0, [], {"level": "bias"}, "true"])
def test_other_values_are_refused_with_the_name_of_the_field(server: Served, value: Any) -> None:
    name = made(server, "a")["id"]
    for path, body in (
        (COMPLETIONS, {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        (SCORE, {"text": "a"}),
        (SESSIONS, {"text": "a"}),
        (f"{SESSIONS}/{name}/append", {"text": "a"}),
    ):
        answer = server.post(path, **body, learn=value)
        assert refused(answer) == "learn", path
        assert answer.json()["error"]["message"] == "learn: must be true or false."
    for query in ("learn=1", "learn=", "lean=true"):
        answer = server.client.post(f"{SESSIONS}?{query}", content=b"a", headers=TEXT_FILE)
        assert refused(answer) == query.partition("=")[0]


def own_tokens(trained: TrainedLanguageModel, learn: bool) -> list[int]:
    session = replace(trained, learn=learn).read(TEXT)
    generation = trained.generate(session, Sampling(temperature=0), [(0,)], 40, keep=True)
    assert len(list(generation)) > 0
    return generation.rows[0].tokens


def test_cached_states_learn_what_the_request_asks_for(trained: TrainedLanguageModel) -> None:
    def asked(scheduler: Any, learn: bool, prompt: str | tuple[int, ...] = TEXT) -> tuple[str, int]:
        before = scheduler.counts.cached_tokens
        text = Told(scheduler, Request(prompt, Sampling(temperature=0), max_tokens=40, learn=learn)).text()
        return text, scheduler.counts.cached_tokens - before

    expected = {learn: text_after(trained, TEXT, learn=learn) for learn in (False, True)}
    with running(trained, memory=1 << 28) as scheduler:
        assert [asked(scheduler, True, MORE)[1] for _ in range(2)] == [0, len(MORE)]
        for cached in (0, len(TEXT)):
            for learn, text in expected.items():
                assert asked(scheduler, learn) == (text, cached)
        for learn in expected:  # what it wrote itself is learned from if a client sends it
            tokens = (trained.tokenizer.bos, *trained.tokenizer.encode(TEXT), *own_tokens(trained, learn), 10)
            again = trained.generate(prefill(trained.model, [tokens], learn=learn), Sampling(temperature=0), [(0,)], 40)
            written = "".join(piece for _, piece in again)
            assert asked(scheduler, learn, tokens) == (written, PIECE)
        assert scheduler.states.bytes > 4 * state_bytes(trained.read(TEXT, learn=True).state.learned)
