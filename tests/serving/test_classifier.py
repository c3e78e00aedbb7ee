"""The server of a model of labels: its answers, its mistakes, and what it does not offer."""

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch
from labelled import label_recipe
from models import save_run, stirred

from lmlong.data.tokenizers.base import ByteTokenizer
from lmlong.inference.classify import TrainedClassifier
from lmlong.inference.loading import load_classifier
from lmlong.model.build import build
from lmlong.serving.classifier import make_classifier_app
from lmlong.serving.guard import Hosts
from lmlong.serving.settings import Settings

from .servers import NAME, answered, error_of, refused, running

CLASSIFY = "/v1/classify"


@pytest.fixture
def trained(tmp_path: Path) -> TrainedClassifier:
    chosen = label_recipe(tmp_path, **{"text.labels.names": ["no", "yes"]})
    torch.manual_seed(0)
    save_run(tmp_path / "run", chosen, stirred(build(chosen, 258), 0.3), ByteTokenizer())
    return load_classifier(tmp_path / "run", "cpu")


@pytest.fixture
def client(trained: TrainedClassifier) -> Iterator[httpx.Client]:
    settings = Settings(grace=0.1, max_prompt=100, max_body=2000)
    app = make_classifier_app(trained, NAME, settings, Hosts("127.0.0.1"))
    with running(app, settings) as (client, _):
        yield client


def test_texts_are_classified_as_in_python(client: httpx.Client, trained: TrainedClassifier) -> None:
    answer = answered(client.post(CLASSIFY, json={"text": "hello", "model": NAME}))
    found = trained.classify("hello")
    (only,) = answer["data"]
    assert (answer["object"], answer["model"], only["object"]) == ("list", NAME, "classification")
    assert (only["label"], only["tokens"], only["read_tokens"]) == (found.label, 7, 7)
    assert only["probabilities"] == pytest.approx(found.probabilities)
    several = answered(client.post(CLASSIFY, json={"text": ["hello", "a" * 20]}))["data"]
    assert several[0] == only and (several[1]["tokens"], several[1]["read_tokens"]) == (22, 16)


def test_mistakes_name_the_field(client: httpx.Client) -> None:
    for body, code, why in (
        ({}, "invalid_value", "text: "),
        ({"text": ""}, "invalid_value", "text.0: "),
        ({"text": []}, "invalid_value", "text: "),
        ({"text": "a\0"}, "invalid_value", "contains U+0000"),
        ({"text": "a", "labels": 1}, "unknown_parameter", "labels: unknown field"),
        ({"text": 101 * "a"}, "context_length_exceeded", "text: 101 bytes are more than the 100"),
        ({"text": 51 * ["aa"]}, "context_length_exceeded", "text: 102 bytes"),
    ):
        answer = client.post(CLASSIFY, json=body)
        assert refused(answer) == (400, code) and why in error_of(answer)["message"], answer.text
    assert refused(client.post(CLASSIFY, json={"text": "a", "model": "other"})) == (404, "model_not_found")
    assert client.post(CLASSIFY, content=b"{", headers={"Content-Type": "application/json"}).status_code == 400
    assert client.post(CLASSIFY, content=3000 * b" ", headers={"Content-Type": "application/json"}).status_code == 413
    assert client.get(CLASSIFY).status_code == 405


def test_it_describes_itself_and_offers_nothing_else(client: httpx.Client) -> None:
    (model,) = answered(client.get("/v1/models"))["data"]
    assert (model["id"], model["labels"], model["trained_length"]) == (NAME, ["no", "yes"], 16)
    assert "writes" not in model and "parameters" in model["about"]
    assert answered(client.get(f"/v1/models/{NAME}")) == model
    assert answered(client.get("/ready")) == {"status": "ready"} == json.loads('{"status": "ready"}')
    answer = client.post("/v1/completions", json={"prompt": "a"})
    assert answer.status_code == 404 and error_of(answer)["message"].endswith("/v1/models, /v1/classify.")
    answered(client.post(CLASSIFY, json={"text": "a"}))
    assert 'lmlong_http_responses_total{path="/v1/classify",status="200"} 1.0' in client.get("/metrics").text
