"""/v1/chat/completions: the answers that a conversation in Python gets."""

import json
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving.chats import TALK, chatting, expected
from serving.schedulers import tiny
from serving.servers import NAME, Served, served, until

from lmlong.inference import chat
from lmlong.inference.loading import TrainedLanguageModel

PATH = "/v1/chat/completions"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> TrainedLanguageModel:
    return chatting(tmp_path_factory.mktemp("chat"))


@pytest.fixture(scope="module")
def server(trained: TrainedLanguageModel) -> Iterator[Served]:
    with served(trained, max_prompt=200) as server:
        yield server


@pytest.mark.parametrize("talk", [TALK, TALK[1:2]], ids=["long", "short"])
def test_an_answer_is_the_one_that_python_gives(
    server: Served, trained: TrainedLanguageModel, talk: list[dict[str, str]]
) -> None:
    wanted = [expected(trained, talk, row, seed=3, max_tokens=12) for row in range(2)]
    answer = server.post(PATH, messages=talk, model=NAME, seed=3, max_tokens=12, n=2).json()
    assert [choice["message"]["content"] for choice in answer["choices"]] == [text for text, _ in wanted]
    assert {choice["message"]["role"] for choice in answer["choices"]} == {"assistant"}
    assert answer["object"] == "chat.completion"
    assert answer["usage"]["prompt_tokens"] == wanted[0][1]
    events = server.events(
        PATH, messages=talk, seed=3, max_completion_tokens=12, n=2, stream_options={"include_usage": True}
    )
    assert [event["choices"][0]["delta"] for event in events[:2]] == [{"role": "assistant", "content": ""}] * 2
    assert events.pop()["usage"] == answer["usage"]
    for number, (text, _) in enumerate(wanted):
        own = [event["choices"][0] for event in events if event["choices"][0]["index"] == number]
        assert "".join(choice["delta"].get("content", "") for choice in own) == text
        assert own[-1]["delta"] == {} and own[-1]["finish_reason"] == answer["choices"][number]["finish_reason"]
        assert not any(choice["finish_reason"] for choice in own[:-1])
    assert {event["object"] for event in events} == {"chat.completion.chunk"}


def test_messages_may_come_in_parts_and_with_names(server: Served) -> None:
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 9}
    parts = [{"type": "text", "text": "No [us"}, {"type": "text", "text": "er] wizards"}]
    same = [
        {**TALK[0], "role": "developer"},
        TALK[1],
        {**TALK[2], "refusal": None, "tool_calls": None},
        {**TALK[3], "content": parts, "name": "me"},
    ]
    wanted, found = (server.post(PATH, messages=talk, **options).json()["choices"] for talk in (TALK, same))
    assert found == wanted


def test_log_probabilities_of_an_answer(server: Served) -> None:
    body: dict[str, Any] = {"messages": TALK, "temperature": 0, "max_tokens": 6, "logprobs": True}
    choice = server.post(PATH, **body, top_logprobs=2).json()["choices"][0]
    told = choice["logprobs"]["content"]
    assert (
        bytes(byte for token in told for byte in token["bytes"]).decode(errors="replace")
        == choice["message"]["content"]
    )
    for token in told:
        first, second = token["top_logprobs"]
        assert {name: token[name] for name in ("token", "logprob", "bytes")} == first, "the likeliest is taken"
        assert first["logprob"] >= second["logprob"]
    bare = server.post(PATH, **body).json()["choices"][0]["logprobs"]["content"]
    assert [token["logprob"] for token in bare] == [token["logprob"] for token in told]
    assert all(token["top_logprobs"] == [] for token in bare)
    assert server.post(PATH, messages=TALK, top_logprobs=2).status_code == 400


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [{"role": "tool", "content": "a"}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a"}}]}],
        [{"role": "user", "content": "a", "tool_calls": [1]}],
    ],
    ids=str,
)
def test_messages_that_are_none_are_refused(server: Served, messages: Any) -> None:
    answer = server.client.post(
        PATH, content=json.dumps({"messages": messages}), headers={"Content-Type": "application/json"}
    )
    assert answer.status_code == 400 and answer.json()["error"]["param"].startswith("messages")


def test_the_messages_of_a_chat_have_a_limit(server: Served) -> None:
    talk = [{"role": "user", "content": "a" * 101}] * 2
    assert server.post(PATH, messages=talk[:1], max_tokens=1).status_code == 200
    assert server.post(PATH, messages=talk).json()["error"]["code"] == "context_length_exceeded"


def test_a_template_that_refuses_is_a_mistake_of_the_request(tmp_path: Path) -> None:
    with served(chatting(tmp_path, "{{ raise_exception('roles must alternate') }}")) as server:
        answer = server.post(PATH, messages=TALK)
    assert answer.status_code == 400 and "roles must alternate" in answer.json()["error"]["message"]
    assert str(tmp_path) not in answer.text


def test_a_model_without_a_template_says_so() -> None:
    with served(tiny()) as server:
        answer = server.post(PATH, messages=TALK)
    assert answer.status_code == 400 and "no chat template" in answer.json()["error"]["message"]


def test_a_server_that_ends_does_not_wait_for_a_template_that_loops(tmp_path: Path) -> None:
    loop = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    answers: list[httpx.Response] = []
    with served(chatting(tmp_path, loop)) as server:
        ask = partial(httpx.post, f"{server.url}{PATH}", json={"messages": TALK}, timeout=60)
        asking = threading.Thread(target=lambda: answers.append(ask()))
        asking.start()
        until(lambda: chat.RENDERER._lock.locked() and chat.RENDERER._process is not None)
        process = chat.RENDERER._process
    asking.join(60)
    assert answers[0].status_code == 503 and process and process.poll() is not None
