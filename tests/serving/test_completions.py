"""/v1/completions and /v1/score: the texts, log-probabilities and sums that Python gives; and what a server says of its
model."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from serving.schedulers import tiny
from serving.servers import NAME, Served, served

import lmlong
from lmlong.data.tokenizers.characters import CharacterTokenizer
from lmlong.inference.loading import TrainedLanguageModel
from lmlong.inference.sampling import Sampling
from lmlong.model.base import count_parameters
from lmlong.recipe import Recipe
from lmlong.serving.answers import printable
from lmlong.serving.app import about

PATH = "/v1/completions"


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
        {"temperature": 0, "max_tokens": 20},
        {"seed": 1, "temperature": 1.5, "top_k": 9, "top_p": 0.8, "min_p": 0.01, "max_tokens": 40},
        {"seed": 2, "repetition_penalty": 1.4, "repetition_window": 10, "loop_penalty": 3.0, "max_tokens": 40},
        {"seed": 5, "max_tokens": 0},
        {"seed": 6},
        {"seed": 6, "ignore_eos": True, "max_tokens": 400},
    ],
    ids=str,
)
def test_a_text_is_the_one_that_python_streams(
    server: Served, trained: TrainedLanguageModel, options: dict[str, Any]
) -> None:
    for prompt in ("", "Once upon a tim"):
        wanted = expected(trained, prompt, **options)
        assert server.texts(prompt=prompt, **options) == [wanted]
        streamed = server.events(PATH, prompt=prompt, **options)
        assert "".join(event["choices"][0]["text"] for event in streamed) == wanted
        assert [event["choices"][0]["finish_reason"] for event in streamed[:-1]] == [None] * (len(streamed) - 1)


def test_several_texts_differ_and_come_again_with_their_seed(server: Served, trained: TrainedLanguageModel) -> None:
    body: dict[str, Any] = {"prompt": ["abc", "xyz"], "n": 3, "max_tokens": 20, "seed": 4}
    texts = server.texts(**body)
    assert len(set(texts)) == 6
    for first, prompt in ((0, "abc"), (3, "xyz")):
        assert texts[first] == expected(trained, prompt, seed=4, max_tokens=20)
        assert texts[first : first + 3] == server.texts(**{**body, "prompt": prompt})
    streamed = [""] * 6
    for event in server.events(PATH, **body):
        (choice,) = event["choices"]
        streamed[choice["index"]] += choice["text"]
    assert streamed == texts


def test_without_a_seed_each_text_is_another(server: Served) -> None:
    body = {"prompt": ["a"] * 12, "max_tokens": 30}
    texts = [text for text in server.texts(**body) + server.texts(**body) if len(text) > 4]  # some end at once
    assert len(set(texts)) > len(texts) / 2 > 3  # so small a model now and then says the same again


def test_an_answer_has_the_fields_of_openai(server: Served) -> None:
    body = {"prompt": "Once", "n": 2, "max_tokens": 9, "temperature": 0}
    answer = server.post(PATH, model=NAME, **body).json()
    assert answer["object"] == "text_completion" and answer["model"] == NAME and answer["id"].startswith("cmpl-")
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"length"}
    counts = {"prompt_tokens": 4, "completion_tokens": 18, "total_tokens": 22}
    assert answer["usage"] == counts | {"prompt_tokens_details": {"cached_tokens": 0}}
    *others, last = server.events(PATH, stream_options={"include_usage": True}, **body)
    assert last["usage"] == answer["usage"] and last["choices"] == []
    assert len({event["id"] for event in [*others, last]}) == 1
    assert not any(event.get("usage") for event in others)
    ignored = {"user": "me", "echo": False, "presence_penalty": 0, "logit_bias": {}, "suffix": None, "stop": None}
    assert server.texts(**body, **ignored) == [choice["text"] for choice in answer["choices"]]


def test_prefixes_are_cached_and_metrics_count(trained: TrainedLanguageModel) -> None:
    with served(trained, memory=1 << 28) as server:
        body: dict[str, Any] = {"max_tokens": 5, "temperature": 0}
        prompt = "Once upon a time. " * 20
        first, again = (server.post(PATH, prompt=prompt, **body).json() for _ in range(2))
        answers = [first, again, server.post(PATH, prompt=prompt + first["choices"][0]["text"], **body).json()]
        cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]
        assert cached == [0, 360, 255]
        assert answers[1]["choices"][0]["text"] == first["choices"][0]["text"]
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
    }.items():
        assert float(values[name]) == value, name
    assert float(values["lmlong_row_state_bytes"]) > 0 < float(values["lmlong_state_memory_bytes"])


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_are_those_of_the_model(server: Served, trained: TrainedLanguageModel, stream: bool) -> None:
    body: dict[str, Any] = {"prompt": "Once", "seed": 2, "max_tokens": 25}
    written = trained.generate(trained.read("Once"), Sampling(seed=2), [(0,)], 25, keep=True)
    assert "".join(piece for _, piece in written)
    row = written.rows[0]
    if stream:
        events = server.events(PATH, **body, logprobs=3)
        told = [event["choices"][0]["logprobs"] for event in events]
        found = {name: [value for each in told for value in each[name]] for name in told[0]}
    else:
        found = server.post(PATH, **body, logprobs=3).json()["choices"][0]["logprobs"]
    assert sum(found["token_logprobs"]) == pytest.approx(sum(written.log_probabilities[0]), rel=1e-5)
    assert len(found["tokens"]) == len(row.tokens)
    for name, value, likeliest in zip(found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True):
        assert len(likeliest) == 3
        assert value <= max(likeliest.values()) + 1e-9
        assert name not in likeliest or likeliest[name] == value
        assert sum(map(math.exp, likeliest.values())) <= 1 + 1e-6
    assert server.post(PATH, **body).json()["choices"][0]["logprobs"] is None


def test_a_text_ends_before_a_stop_string(server: Served, trained: TrainedLanguageModel) -> None:
    whole = expected(trained, "Once", seed=3, max_tokens=80)
    stop = whole[30:32]
    body = {"prompt": "Once", "seed": 3, "max_tokens": 80, "stop": ["never there", stop]}
    answer = server.post(PATH, **body).json()["choices"][0]
    assert answer["text"] == whole[: whole.find(stop)] and answer["finish_reason"] == "stop"
    events = server.events(PATH, **{**body, "stop": stop})
    assert "".join(event["choices"][0]["text"] for event in events) == answer["text"]
    assert events[-1]["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"promt": "a"}, "promt"),
        ({"prompt": [[1], [2]]}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": "a\0b"}, "prompt.0"),
        ({"prompt": 3}, "prompt"),
        ({"echo": True}, "echo"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"max_tokens": 10**30}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"n": 17}, "n"),
        ({"top_p": 0}, "top_p"),
        ({"seed": 1 << 63}, "seed"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": ""}, "stop.0"),
        ({"logprobs": 21}, "logprobs"),
        ({"stream": 1}, "stream"),
        ({"stream_options": {"usage": True}}, "stream_options.usage"),
    ],
    ids=str,
)
def test_what_cannot_be_done_is_refused_by_name(server: Served, wrong: dict[str, Any], param: str) -> None:
    answer = server.post(PATH, **{"prompt": "a", "max_tokens": 1, **wrong})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param and param.split(".")[0] in error["message"]
    assert error["type"] == "invalid_request_error"


def test_models_are_listed(server: Served) -> None:
    (model,) = server.client.get("/v1/models").json()["data"]
    assert model["id"] == NAME and server.client.get(f"/v1/models/{NAME}").json() == model
    assert server.client.get("/v1/models/other").json()["error"]["code"] == "model_not_found"
    assert server.post(PATH, prompt="a", model="other").status_code == 404


def test_a_score_is_the_sum_that_evaluate_gives(server: Served, trained: TrainedLanguageModel) -> None:
    text = "It was a dark and stormy night; \u00fcber \U0001f600. " * 20
    report = lmlong.evaluate(trained, texts=text, views=["position"], lengths=[1], min_documents=1)
    assert report.carried is not None
    totals = report.carried.totals
    found = server.post("/v1/score", text=text).json()
    assert (found["tokens"], found["bytes"]) == (totals.tokens, totals.bytes)
    assert found["bits"] == pytest.approx(totals.nats / math.log(2), rel=1e-12)
    assert found["bits_per_byte"] == pytest.approx(totals.bits_per_byte, rel=1e-12)
    assert server.post("/v1/score", text="").status_code == 400


def test_a_stream_in_which_nothing_happens_is_kept_alive(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmlong.serving.streaming.SILENCE", 0.01)
    body = {"prompt": "It was a dark and stormy night. " * 2000, "max_tokens": 1, "stream": True}
    with server.client.stream("POST", PATH, json=body) as answer:
        lines = [line for line in answer.iter_lines() if line]
    comments = [line for line in lines if line.startswith(":")]
    assert len(comments) > 2 and lines[: len(comments)] == comments, "while the prompt is read"
    assert lines[-1] == "data: [DONE]"


def test_the_settings_of_a_server_are_limits(trained: TrainedLanguageModel) -> None:
    with served(trained, max_prompt=10, max_tokens=5, max_choices=2) as server:
        assert len(server.texts(prompt=["\u00e4" * 5, "b"], max_tokens=5)) == 2
        for wrong in ({"prompt": "\u00e4" * 6}, {"max_tokens": 6}, {"n": 3}, {"n": 2, "prompt": ["a", "b"]}):
            answer = server.post(PATH, **{"prompt": "a", **wrong})
            assert answer.status_code == 400, wrong
        assert server.post("/v1/score", text="b" * 11).status_code == 400
        written = server.post(PATH, prompt="a", temperature=0).json()
        assert written["usage"]["completion_tokens"] == 5, "as many as the server allows"


def test_a_model_of_an_alphabet_refuses_other_characters() -> None:
    prompt = "GATTACA" * 5
    trained = tiny(tokenizer=CharacterTokenizer("ACGT"))
    assert sum(base.bytes for base in lmlong.score(trained, prompt, by="token")) == 35
    with served(trained, rows=2) as server:
        expected = "".join(trained.stream(prompt, seed=1, max_tokens=30))
        assert server.texts(prompt=prompt, seed=1, max_tokens=30) == [expected] and set(expected) <= set("ACGT")
        for path, body in (("/v1/completions", {"prompt": "GATTAXA"}), ("/v1/score", {"text": "GATTAXA"})):
            refused = server.post(path, **body)
            message = "character 6: 'X' (U+0058) is not in the alphabet of this model."
            assert refused.status_code == 400 and refused.json()["error"]["message"] == message
        scored = server.post("/v1/score", text=prompt).json()
        assert (scored["bytes"], scored["tokens"]) == (35, 36)


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
