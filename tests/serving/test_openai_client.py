"""The client of OpenAI against a server of ours: it understands the answers, streams and errors."""

from collections.abc import Iterator
from typing import Any

import pytest
from serving.chats import TALK, chatting, expected
from serving.servers import NAME, Served, served, until

openai = pytest.importorskip("openai")
pytestmark = pytest.mark.interop

KEY = "a-key"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(chatting(tmp_path_factory.mktemp("chat")), key=KEY, max_tokens=10**6) as server:
        yield server


def client_of(server: Served, key: str = KEY) -> Any:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)


def test_texts_and_conversations(server: Served) -> None:
    client = client_of(server)
    options: dict[str, Any] = {"model": NAME, "prompt": "The quick", "seed": 2, "max_tokens": 15}
    answer = client.completions.create(**options, logprobs=2, extra_body={"top_k": None, "min_p": 0.0})
    assert len(answer.choices[0].logprobs.token_logprobs) == answer.usage.completion_tokens
    stream = client.completions.create(**options, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == answer.choices[0].text

    wanted, tokens = expected(server.service.trained, TALK, seed=2, max_tokens=15)
    options = {"model": NAME, "messages": TALK, "seed": 2, "max_completion_tokens": 15}
    answer = client.chat.completions.create(**options, logprobs=True, top_logprobs=3)
    assert answer.choices[0].message.content == wanted and answer.usage.prompt_tokens == tokens
    assert len(answer.choices[0].logprobs.content[0].top_logprobs) == 3
    chunks = list(client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == wanted
    assert chunks[-1].usage == answer.usage


def test_errors(server: Served) -> None:
    client = client_of(server)
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model=NAME, prompt="a", presence_penalty=1.0)
    assert refused.value.param == "presence_penalty" and refused.value.code == "unsupported_parameter"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="a")
    with pytest.raises(openai.AuthenticationError):
        client_of(server, "another").models.list()
    assert [model.id for model in client.models.list()] == [NAME]


def test_a_stream_that_is_closed_frees_its_row(server: Served) -> None:
    options: dict[str, Any] = {"model": NAME, "prompt": "The", "temperature": 0, "max_tokens": 10**6}
    stream = client_of(server).completions.create(**options, stream=True)
    assert next(iter(stream))
    assert server.service.scheduler.active == 1
    stream.close()
    until(lambda: server.service.scheduler.active == 0)
