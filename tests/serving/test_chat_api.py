"""/v1/chat/completions: the answers that a conversation in Python gets."""

import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving.chats import TALK, chatting, expected
from serving.schedulers import tiny
from serving.servers import CHAT, NAME, Served, answered, error_of, refused, served, until

from lmlong.inference import chat
from lmlong.inference.loading import TrainedLanguageModel


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> TrainedLanguageModel:
    return chatting(tmp_path_factory.mktemp("chat"))


@pytest.fixture(scope="module")
def server(trained: TrainedLanguageModel) -> Iterator[Served]:
    with served(trained, max_prompt=200) as server:
        yield server


def test_an_answer_is_the_one_that_python_gives(server: Served, trained: TrainedLanguageModel) -> None:
    wanted = [expected(trained, TALK, row, seed=3, max_tokens=12) for row in range(2)]
    body: dict[str, Any] = {"messages": TALK, "seed": 3, "n": 2}
    answer = answered(server.post(CHAT, model=NAME, max_tokens=12, **body))
    assert [choice["message"]["content"] for choice in answer["choices"]] == [text for text, _ in wanted]
    assert {choice["message"]["role"] for choice in answer["choices"]} == {"assistant"}
    assert answer["object"] == "chat.completion"
    assert answer["usage"]["prompt_tokens"] == wanted[0][1]
    events = server.events(CHAT, max_completion_tokens=12, stream_options={"include_usage": True}, **body)
    assert [event["choices"][0]["delta"] for event in events[:2]] == [{"role": "assistant", "content": ""}] * 2
    assert events.pop()["usage"] == answer["usage"]
    for number, (text, _) in enumerate(wanted):
        own = [event["choices"][0] for event in events if event["choices"][0]["index"] == number]
        assert "".join(choice["delta"].get("content", "") for choice in own) == text
        assert own[-1]["delta"] == {} and own[-1]["finish_reason"] == answer["choices"][number]["finish_reason"]
        assert not any(choice["finish_reason"] for choice in own[:-1])
    assert {event["object"] for event in events} == {"chat.completion.chunk"}


def test_messages_may_come_in_parts_and_with_names(server: Served) -> None:
    parts = [{"type": "text", "text": "No [us"}, {"type": "text", "text": "er] wizards"}]
    same = [
        {**TALK[0], "role": "developer"},
        TALK[1],
        {**TALK[2], "refusal": None, "tool_calls": None},
        {**TALK[3], "content": parts, "name": "me"},
    ]
    answers = [answered(server.post(CHAT, messages=talk, temperature=0, max_tokens=9)) for talk in (TALK, same)]
    assert answers[0]["choices"] == answers[1]["choices"]


def test_log_probabilities_of_an_answer(server: Served) -> None:
    body: dict[str, Any] = {"messages": TALK, "temperature": 0, "max_tokens": 6, "logprobs": True}
    choice = answered(server.post(CHAT, **body, top_logprobs=2))["choices"][0]
    told = choice["logprobs"]["content"]
    text = bytes(byte for token in told for byte in token["bytes"]).decode(errors="replace")
    assert text == choice["message"]["content"]
    for token in told:
        first, second = token["top_logprobs"]
        assert {name: token[name] for name in ("token", "logprob", "bytes")} == first, "the likeliest is taken"
        assert first["logprob"] >= second["logprob"]
    bare = answered(server.post(CHAT, **body))["choices"][0]["logprobs"]["content"]
    assert bare == [{**token, "top_logprobs": []} for token in told]


def test_the_messages_of_a_chat_have_a_limit(server: Served) -> None:
    talk = [{"role": "user", "content": "a" * 101}] * 2
    assert server.post(CHAT, messages=talk[:1], max_tokens=1).status_code == 200
    assert refused(server.post(CHAT, messages=talk)) == (400, "context_length_exceeded")


def test_a_template_that_refuses_is_a_mistake_of_the_request(tmp_path: Path) -> None:
    with served(chatting(tmp_path, "{{ raise_exception('roles must alternate') }}")) as server:
        answer = server.post(CHAT, messages=TALK)
    assert answer.status_code == 400 and "roles must alternate" in error_of(answer)["message"]


def test_a_model_without_a_template_says_so() -> None:
    with served(tiny()) as server:
        answer = server.post(CHAT, messages=TALK)
    assert answer.status_code == 400 and "no chat template" in error_of(answer)["message"]


def test_a_server_that_ends_does_not_wait_for_a_template_that_loops(tmp_path: Path) -> None:
    loop = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    answers: list[httpx.Response] = []
    with served(chatting(tmp_path, loop)) as server:
        ask = partial(httpx.post, f"{server.url}{CHAT}", json={"messages": TALK}, timeout=60)
        asking = threading.Thread(target=lambda: answers.append(ask()))
        asking.start()
        until(lambda: chat.RENDERER._lock.locked() and chat.RENDERER._process is not None)
        process = chat.RENDERER._process
    asking.join(60)
    assert answers[0].status_code == 503 and process and process.poll() is not None
