"""/v1/completions and /v1/score: the texts that Python gives, and what a server says of its model."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from serving.schedulers import tiny
from serving.servers import COMPLETIONS, NAME, SCORE, Served, error_of, refused, served

import lmlong
from lmlong.data.tokenizers.characters import CharacterTokenizer
from lmlong.inference.loading import TrainedLanguageModel
from lmlong.model.base import count_parameters
from lmlong.model.state_size import state_size
from lmlong.recipe import Recipe
from lmlong.serving.answers import printable
from lmlong.serving.app import about


@pytest.fixture(scope="module")
def trained() -> TrainedLanguageModel:
    return tiny("ngram", native=True)


@pytest.fixture(scope="module")
def server(trained: TrainedLanguageModel) -> Iterator[Served]:
    with served(trained, rows=8) as server:
        yield server


def expected(trained: TrainedLanguageModel, prompt: str, **options: Any) -> str:
    return printable("".join(trained.stream(prompt, **options)))


@pytest.mark.parametrize(
    "options",
    [
        {"seed": 2, "temperature": 1.5, "top_p": 0.8, "repetition_penalty": 1.4, "max_tokens": 40},
        {"seed": 3, "max_tokens": 80, "stop": ["never there", "a"]},
        {"seed": 5, "max_tokens": 0},
        {"seed": 6},
        {"seed": 6, "ignore_eos": True, "max_tokens": 150},
    ],
    ids=str,
)
def test_a_text_is_the_one_that_python_streams(
    server: Served, trained: TrainedLanguageModel, options: dict[str, Any]
) -> None:
    for prompt in ("", "Once upon a tim"):
        wanted = expected(trained, prompt, **options)
        (choice,) = server.completion(prompt=prompt, **options)["choices"]
        *events, last = (event["choices"][0] for event in server.events(COMPLETIONS, prompt=prompt, **options))
        assert choice["text"] == wanted == "".join(event["text"] for event in [*events, last])
        assert choice["finish_reason"] == last["finish_reason"] in ("stop", "length")
        assert not any(event["finish_reason"] for event in events)


def test_several_texts_differ_and_come_again_with_their_seed(server: Served, trained: TrainedLanguageModel) -> None:
    body: dict[str, Any] = {"prompt": ["abc", "xyz"], "n": 3, "max_tokens": 20, "seed": 4}
    texts = server.texts(**body)
    assert len(set(texts)) == 6
    for first, prompt in ((0, "abc"), (3, "xyz")):
        assert texts[first] == expected(trained, prompt, seed=4, max_tokens=20)
        assert texts[first : first + 3] == server.texts(**{**body, "prompt": prompt})
    streamed = [""] * 6
    for event in server.events(COMPLETIONS, **body):
        (choice,) = event["choices"]
        streamed[choice["index"]] += choice["text"]
    assert streamed == texts


def test_an_answer_has_the_fields_of_openai(server: Served) -> None:
    body = {"prompt": "Once", "n": 2, "max_tokens": 9, "temperature": 0}
    answer = server.completion(model=NAME, **body)
    assert answer["object"] == "text_completion" and answer["model"] == NAME and answer["id"].startswith("cmpl-")
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"length"}
    counts = {"prompt_tokens": 4, "completion_tokens": 18, "total_tokens": 22}
    assert answer["usage"] == counts | {"prompt_tokens_details": {"cached_tokens": 0}}
    *others, last = server.events(COMPLETIONS, stream_options={"include_usage": True}, **body)
    assert last["usage"] == answer["usage"] and last["choices"] == []
    assert len({event["id"] for event in [*others, last]}) == 1
    assert not any(event.get("usage") for event in others)
    ignored = {"user": "me", "echo": False, "presence_penalty": 0, "logit_bias": {}, "suffix": None, "stop": None}
    assert server.texts(**body, **ignored) == [choice["text"] for choice in answer["choices"]]
    (model,) = server.get("/v1/models")["data"]
    assert model["id"] == NAME and server.get(f"/v1/models/{NAME}") == model


def test_prefixes_are_cached_and_metrics_count(trained: TrainedLanguageModel) -> None:
    with served(trained, memory=1 << 28) as server:
        prompt, options = "Once upon a time. " * 20, {"max_tokens": 5, "temperature": 0}
        first, again = (server.completion(prompt=prompt, **options) for _ in range(2))
        answers = [first, again, server.completion(prompt=prompt + first["choices"][0]["text"], **options)]
        cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]
        assert cached == [0, 360, 255]
        assert again["choices"] == first["choices"]
        server.client.get("/nowhere")
        text = server.client.get("/metrics").text
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    for name, value in {
        "lmlong_texts_total": 3,
        "lmlong_cached_tokens_total": sum(cached),
        "lmlong_written_tokens_total": sum(answer["usage"]["completion_tokens"] for answer in answers),
        "lmlong_prompt_tokens_total": sum(answer["usage"]["prompt_tokens"] for answer in answers),
        "lmlong_first_token_seconds_count": 3,
        "lmlong_request_seconds_count": 3,
        'lmlong_http_responses_total{path="/v1/completions",status="200"}': 3,
        'lmlong_http_responses_total{path="other",status="404"}': 1,
        "lmlong_row_state_bytes": state_size(trained.model).empty.bytes,
    }.items():
        assert float(values[name]) == value > 0, name
    assert float(values["lmlong_state_memory_bytes"]) > 0


def test_log_probabilities_are_listed_whole_as_in_a_stream(server: Served) -> None:
    """Their values are checked where the scheduler delivers them."""
    body: dict[str, Any] = {"prompt": "Once", "seed": 2, "max_tokens": 25}
    answer = server.completion(**body, logprobs=3)
    found = answer["choices"][0]["logprobs"]
    told = [event["choices"][0]["logprobs"] for event in server.events(COMPLETIONS, **body, logprobs=3)]
    assert found == {name: [value for each in told for value in each[name]] for name in told[0]}
    assert len(found["tokens"]) == answer["usage"]["completion_tokens"] > 9
    for name, value, likeliest in zip(found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True):
        assert len(likeliest) == 3
        assert value <= max(likeliest.values()) + 1e-9
        assert name not in likeliest or likeliest[name] == value
        assert sum(map(math.exp, likeliest.values())) <= 1 + 1e-6
    assert server.completion(**body)["choices"][0]["logprobs"] is None


def test_a_stream_in_which_nothing_happens_is_kept_alive(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmlong.serving.streaming.SILENCE", 0.01)
    body = {"prompt": "It was a dark and stormy night. " * 1000, "max_tokens": 1, "stream": True}
    with server.client.stream("POST", COMPLETIONS, json=body) as answer:
        lines = [line for line in answer.iter_lines() if line]
    comments = [line for line in lines if line.startswith(":")]
    assert len(comments) > 2 and lines[: len(comments)] == comments, "while the prompt is read"
    assert lines[-1] == "data: [DONE]"


def test_the_settings_of_a_server_are_limits(trained: TrainedLanguageModel) -> None:
    with served(trained, max_prompt=10, max_tokens=5, max_choices=2) as server:
        assert len(server.texts(prompt=["\u00e4" * 5, "b"], max_tokens=5)) == 2
        for wrong in ({"prompt": "\u00e4" * 6}, {"max_tokens": 6}, {"n": 3}, {"n": 2, "prompt": ["a", "b"]}):
            answer = server.post(COMPLETIONS, **{"prompt": "a", **wrong})
            assert answer.status_code == 400 and error_of(answer)["param"] == next(iter(wrong))
        assert refused(server.post(SCORE, text="b" * 11)) == (400, "context_length_exceeded")
        written = server.completion(prompt="a", temperature=0)
        assert written["usage"]["completion_tokens"] == 5, "as many as the server allows"


def test_a_model_of_an_alphabet_refuses_other_characters() -> None:
    prompt = "GATTACA" * 5
    trained = tiny(tokenizer=CharacterTokenizer("ACGT"))
    assert sum(base.bytes for base in lmlong.score(trained, prompt, by="token")) == 35
    with served(trained, rows=2) as server:
        wanted = expected(trained, prompt, seed=1, max_tokens=30)
        assert server.texts(prompt=prompt, seed=1, max_tokens=30) == [wanted] and set(wanted) <= set("ACGT")
        for path, field in ((COMPLETIONS, "prompt"), (SCORE, "text")):
            answer = server.post(path, **{field: "GATTAXA"})
            message = "character 6: 'X' (U+0058) is not in the alphabet of this model."
            assert answer.status_code == 400 and error_of(answer)["message"] == message
        scored = server.post(SCORE, text=prompt).json()
    assert (scored["bytes"], scored["tokens"]) == (35, 36)
    assert scored["bits_per_byte"] == pytest.approx(scored["bits"] / 35, rel=1e-12)


STDLIB: dict[str, Any] = {"kind": "python-stdlib"}


@pytest.mark.parametrize(
    ("sources", "writes"),
    [
        ([STDLIB], "code"),
        ([{"kind": "files", "paths": ["/home/me/secret/**/*.py", "b.RS"]}], "code"),
        ([{"kind": "files", "paths": ["/home/me/secret", "b.py"]}], "text"),
        ([STDLIB, {"kind": "files", "paths": ["a.txt"]}], "text"),
        ([{"kind": "hub", "dataset": "org/name"}], "text"),
    ],
)
def test_a_server_says_what_its_model_writes_and_names_no_file(sources: list[dict[str, Any]], writes: str) -> None:
    trained = replace(tiny(), recipe=Recipe.model_validate({"text": {"sources": sources}}), trained_tokens=12_345)
    said = about(trained)
    assert said["writes"] == writes
    stdlib = " of Python's standard library" if sources == [STDLIB] else ""
    assert said["about"] == f"{count_parameters(trained.model):,} parameters, trained on 12,345 tokens{stdlib}."
