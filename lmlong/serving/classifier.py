"""The HTTP API of a model of labels."""

from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from lmlong.inference.classify import Classification, TrainedClassifier
from lmlong.serving.api_errors import shutting_down
from lmlong.serving.app import Service, application, sentence
from lmlong.serving.bodies import ClassifyBody, check_length
from lmlong.serving.guard import BODY, Hosts
from lmlong.serving.metrics import HttpMetrics
from lmlong.serving.settings import Settings
from lmlong.serving.worker import Ended, Worker


class ClassifierServer(Service):
    """A served model of labels, which classifies the texts of one request after another."""

    def __init__(self, trained: TrainedClassifier, name: str, settings: Settings):
        about: dict[str, Any] = {"about": sentence(trained), "labels": trained.labels}
        about["trained_length"] = trained.recipe.text.sequence_length
        super().__init__(name, settings, HttpMetrics(), about)
        self.trained = trained
        self.classifier = Worker("lmlong-classifier", settings.jobs)
        self.workers = (self.classifier, self.reader.parser, self.reader.converter)

    async def classify(self, request: HttpRequest) -> Response:
        body = await self.reader.parse(ClassifyBody, request.scope[BODY])
        self._check_model(body.model)
        check_length("".join(body.text), self.settings.max_prompt, "text")
        found = await self.classifier.run(lambda ended: self._classified(body.text, ended))
        return JSONResponse({"object": "list", "model": self.name, "data": [_described(each) for each in found]})

    def _classified(self, texts: list[str], ended: Ended) -> list[Classification]:
        found = []
        for text in texts:
            if ended():
                raise shutting_down()
            found += self.trained.classify_tokens([self.trained.tokens_of(text)])
        return found


def _described(found: Classification) -> dict[str, Any]:
    about = {"label": found.label, "probabilities": found.probabilities, "tokens": found.tokens}
    return {"object": "classification", **about, "read_tokens": found.read}


def make_classifier_app(
    trained: TrainedClassifier, name: str, settings: Settings, hosts: Hosts, key: str | None = None
) -> Starlette:
    """Return the application that serves a model of labels, as `make_app` does a language model."""
    service = ClassifierServer(trained, name, settings)
    return application(service, [("/v1/classify", "POST", service.classify)], hosts, key)
