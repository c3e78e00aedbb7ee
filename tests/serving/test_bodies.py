"""Bodies are read in bounded memory, beside the event loop, and errors quote little of them."""

import asyncio
import json
import threading
import tracemalloc
from typing import Any

import pytest

from lmlong.serving.api_errors import ApiError
from lmlong.serving.bodies import (
    Body,
    ChatBody,
    CompletionBody,
    FileQuery,
    ListQuery,
    ScoreBody,
    TextBody,
    TextQuery,
    parse,
    parse_query,
)
from lmlong.serving.body_reader import SMALL, BodyReader
from lmlong.serving.settings import Settings

MB = 1 << 20

HOSTILE = {
    "empty objects": b'{"prompt": [' + b"{}," * (MB // 3) + b"{}]}",
    "unknown keys": b"{" + b",".join(b'"k%d":1' % number for number in range(MB // 10)) + b"}",
    "strings": b'{"prompt": [' + b'"",' * (MB // 3) + b'""]}',
    "nested lists": b'{"prompt": ' + b"[[],[]," * (MB // 7) + b"]" * (MB // 7) + b"}",
    "closing brackets": b'{"prompt": [' + b"]" * MB,
    "after escaped quotes": b'{"a": "\\\\\\"' + b'{}",' + b'"prompt": [' + b"{}," * (MB // 3) + b"{}]}",
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_body_of_many_values_takes_little_memory(kind: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(ApiError) as refused:
            parse(CompletionBody, HOSTILE[kind])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert refused.value.status == 400 and "too many values" in refused.value.message
    assert peak < 16 * MB


VALID: dict[type[Body], dict[str, Any]] = {
    CompletionBody: {"prompt": "a", "max_tokens": 1},
    ChatBody: {"messages": [{"role": "user", "content": "a"}]},
    ScoreBody: {"text": "a"},
    TextBody: {"text": "a"},
}
QUERIES = (FileQuery, ListQuery, TextQuery)
REFUSED: list[tuple[type[Body], dict[str, Any], str]] = [
    (CompletionBody, {"promt": "a"}, "promt"),
    (CompletionBody, {"prompt": [[1], [2]]}, "prompt"),
    (CompletionBody, {"prompt": []}, "prompt"),
    (CompletionBody, {"prompt": "a\0b"}, "prompt.0"),
    (CompletionBody, {"prompt": 3}, "prompt"),
    (CompletionBody, {"prompt": None}, "prompt"),
    (CompletionBody, {"echo": True}, "echo"),
    (CompletionBody, {"logit_bias": {"5": 1}}, "logit_bias"),
    (CompletionBody, {"max_tokens": "5"}, "max_tokens"),
    (CompletionBody, {"top_p": 0}, "top_p"),
    (CompletionBody, {"seed": 1 << 63}, "seed"),
    (CompletionBody, {"stop": ["a"] * 17}, "stop"),
    (CompletionBody, {"stop": ""}, "stop.0"),
    (CompletionBody, {"logprobs": 21}, "logprobs"),
    (CompletionBody, {"stream": 1}, "stream"),
    (CompletionBody, {"stream_options": {"usage": True}}, "stream_options.usage"),
    (CompletionBody, {"fork": True}, "fork"),
    (CompletionBody, {"session": "a", "n": 2}, "session"),
    (CompletionBody, {"session": "a", "prompt": ["a", "b"]}, "session"),
    (ChatBody, {"messages": []}, "messages"),
    (ChatBody, {"messages": [{"role": "tool", "content": "a"}]}, "messages.0.role"),
    (ChatBody, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content"),
    (ChatBody, {"messages": [{"role": "user", "content": "a", "tool_calls": [1]}]}, "messages.0.tool_calls"),
    (ChatBody, {"top_logprobs": 2}, "top_logprobs"),
    (ScoreBody, {"text": ""}, "text"),
    *((kind, {"learn": value}, "learn") for kind in VALID for value in ("output", "", 1, 0, [], {"a": 1}, "true")),
    *((FileQuery, {"learn": value}, "learn") for value in ("1", "")),
    (FileQuery, {"lean": "true"}, "lean"),
    *((ListQuery, {"limit": value}, "limit") for value in ("0", "1001", "x", "-1")),
    (ListQuery, {"offset": "1"}, "offset"),
    *((TextQuery, {"logprobs": value}, "logprobs") for value in ("21", "-1", "x")),
    (TextQuery, {"lines": "1"}, "lines"),
]


@pytest.mark.parametrize(("kind", "wrong", "param"), REFUSED)
def test_a_value_that_is_refused_is_named(kind: type[Body], wrong: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as refused:
        if kind in QUERIES:
            parse_query(kind, wrong)
        else:
            parse(kind, json.dumps({**VALID[kind], **wrong}).encode())
    assert refused.value.status == 400 and refused.value.param == param
    assert param.split(".")[0] in refused.value.message
    if param == "learn":
        assert refused.value.message == "learn: must be true or false."


def test_all_options_of_sampling_are_taken() -> None:
    options: dict[str, Any] = {"seed": 1, "temperature": 1.5, "top_k": 9, "top_p": 0.8, "min_p": 0.01}
    options |= {"repetition_penalty": 1.4, "repetition_window": 10, "loop_penalty": 3.0, "ignore_eos": True}
    sampling = parse(CompletionBody, json.dumps({"prompt": "a", **options}).encode()).sampling()
    assert vars(sampling) == options
    seeds = {parse(CompletionBody, b'{"prompt": "a"}').sampling().seed for _ in range(9)}
    assert len(seeds) == 9, "without a seed, each text is another"


MALFORMED = [
    (b"[" * 300 + b"]" * 300, "not JSON: recursion limit"),
    (b'{"prompt":' * 50_000, "not JSON: recursion limit"),
    (json.dumps({f"k{number}": 1 for number in range(300)}).encode(), "has 300 fields"),
    (b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", "not JSON"),
    (b'{"prompt": [1, 2}', "not JSON"),
    (b'{"a": "' + b"\\" * 9, "not JSON"),
    (b'{"prompt": "a", "user": NaN}', "not JSON"),
    (b'{"prompt": "a", "temperature": 1e999}', "temperature"),
    (b'{"prompt": "\\ud800"}', "not JSON"),
    (b'{"prompt": "a", "user": "\xff"}', "not JSON"),
    (b"", "not JSON"),
]


@pytest.mark.parametrize(("data", "message"), MALFORMED)
def test_json_that_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(ApiError, match=message) as refused:
        parse(CompletionBody, data)
    assert refused.value.status == 400


def test_of_two_fields_of_one_name_the_last_counts() -> None:
    assert parse(CompletionBody, b'{"prompt": "a", "prompt": "b"}').prompt == ["b"]


@pytest.mark.parametrize("text", ['a "quoted", [bracketed] {text}\\' * 50_000, '\\"{' * 500_000])
def test_characters_in_strings_are_not_structure(text: str) -> None:
    assert parse(CompletionBody, json.dumps({"prompt": text}).encode()).prompt == [text]


def test_all_messages_that_are_allowed_can_be_sent() -> None:
    message = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "c"}
    body = parse(ChatBody, json.dumps({"messages": [message] * 4096}).encode())
    assert len(body.messages) == 4096 and body.messages[-1].content == "ab"


def test_a_large_body_is_parsed_beside_the_event_loop() -> None:
    class Noted(CompletionBody):
        def model_post_init(self, context: Any) -> None:
            threads.append(threading.current_thread())

    async def parsed(size: int) -> None:
        reader = BodyReader(Settings())
        try:
            await reader.parse(Noted, json.dumps({"prompt": "a" * size}).encode())
        finally:
            reader.parser.close()

    threads: list[threading.Thread] = []
    asyncio.run(parsed(SMALL))
    assert len(threads) == 1 and threads[0] is not threading.current_thread()


@pytest.mark.parametrize(
    "body",
    [
        {"x" * MB: 1, "prompt": "a"},
        {"prompt": "a", "stop": ["x" * MB]},
        {"prompt": "a", "stream_options": {"x" * MB: 1}},
    ],
    ids=["unknown", "stop", "nested"],
)
def test_an_error_quotes_little_of_a_body(body: dict[str, Any]) -> None:
    with pytest.raises(ApiError) as refused:
        parse(CompletionBody, json.dumps(body).encode())
    answer = refused.value.response()
    assert answer.status_code == 400 and 50 < len(answer.body) < 1000
    assert len(ApiError(404, "x" * MB).response().body) < 1000
