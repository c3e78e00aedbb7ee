"""The HTTP API of a model: its routes and their handlers."""

import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import PurePath
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from lmlong.errors import UsageError
from lmlong.inference import chat
from lmlong.inference.loading import TrainedLanguageModel
from lmlong.inference.trained_model import TrainedModel
from lmlong.model.base import count_parameters
from lmlong.model.sampling_options import MAX_TOKENS
from lmlong.recipe import Recipe
from lmlong.recipe.text import Files, PythonStdlib
from lmlong.serving import page
from lmlong.serving.answers import ChatFormat, CompletionFormat, TextFormat
from lmlong.serving.api_errors import ApiError, api_error, not_ready, scheduler_failed, shutting_down
from lmlong.serving.bodies import ChatBody, CompletionBody, ScoreBody, WritingBody, check_length
from lmlong.serving.body_reader import BodyReader
from lmlong.serving.guard import BODY, Guard, Hosts
from lmlong.serving.inbox import Texts
from lmlong.serving.metrics import HttpMetrics, Metrics
from lmlong.serving.request import Request
from lmlong.serving.scheduler import Scheduler
from lmlong.serving.session_api import SessionApi
from lmlong.serving.session_change import Change, Sessions
from lmlong.serving.session_store import SessionStore
from lmlong.serving.settings import Settings
from lmlong.serving.streaming import Deadline, Disconnected, respond, while_connected
from lmlong.serving.worker import Worker, chat_tokens, score

CODE = frozenset(
    {".c", ".cc", ".cpp", ".go", ".h", ".java", ".jl", ".js", ".py", ".r", ".rb", ".rs", ".sh", ".sql", ".ts"}
)
"""Suffixes of files that hold code."""


class Service:
    """A served model of any kind: its description, its health, its metrics, and the workers that handle requests."""

    workers: Sequence[Worker]

    def __init__(self, name: str, settings: Settings, metrics: HttpMetrics, about: dict[str, Any]):
        self.name, self.settings, self.metrics, self.about = name, settings, metrics, about
        self.reader = BodyReader(settings)
        self.closing = False
        self.created = int(time.time())

    def end(self) -> None:
        """Stop all workers."""
        self.closing = True
        for worker in self.workers:
            worker.close()
        self.reader.process.close()

    async def models(self, request: HttpRequest) -> Response:
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: HttpRequest) -> Response:
        self._check_model(request.path_params["name"])
        return JSONResponse(self._model())

    async def health(self, request: HttpRequest) -> Response:
        return JSONResponse({"status": "ok"})

    async def ready(self, request: HttpRequest) -> Response:
        if self.closing:
            raise shutting_down()
        if ended := [worker.name for worker in self.workers if not worker.alive]:
            raise not_ready(f"The thread {ended[0]} has ended. Restart the server.")
        return JSONResponse({"status": "ready"})

    async def metrics_text(self, request: HttpRequest) -> Response:
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4")

    def _model(self) -> dict[str, Any]:
        return {"id": self.name, "object": "model", "created": self.created, "owned_by": "lmlong", **self.about}

    def _check_model(self, name: str | None) -> None:
        if name is not None and name != self.name:
            raise ApiError(404, f"model: not found. This server serves {self.name!r}.", "model", "model_not_found")


class ModelServer(Service):
    """A served language model, with the scheduler of its requests."""

    metrics: Metrics

    def __init__(self, trained: TrainedLanguageModel, name: str, store: SessionStore, settings: Settings):
        self.trained = trained
        self.scheduler = Scheduler(trained, store.states, settings)
        described = {**about(trained), "learns": trained.learn}
        super().__init__(name, settings, Metrics(self.scheduler, store), described)
        self.sessions = Sessions(store, settings.waiting)
        self.scorer = Worker("lmlong-scorer", settings.jobs)
        self.session_api = SessionApi(self.sessions, self.scheduler, self.reader, self.scorer, settings, self.metrics)
        self.renderer = Worker("lmlong-renderer", settings.jobs)
        self.workers = (self.scorer, self.renderer, self.reader.parser, self.reader.converter, self.sessions.worker)

    def end(self) -> None:
        """Stop the scheduler and all workers."""
        super().end()
        chat.RENDERER.close()  # a template may loop
        self.scheduler.close()

    async def ready(self, request: HttpRequest) -> Response:
        if not self.closing and not self.scheduler.alive:
            raise scheduler_failed()
        return await super().ready(request)

    async def completions(self, request: HttpRequest) -> ASGIApp:
        body = await self.reader.parse(CompletionBody, request.scope[BODY])
        for number, prompt in enumerate(body.prompt):
            check_length(prompt, self.settings.max_prompt, "prompt" if len(body.prompt) == 1 else f"prompt.{number}")
        self._check(body, len(body.prompt))
        if body.session is None:
            how = {"learn": self.trained.learns(body.learn)}
            requests = [made for prompt in body.prompt for made in self._requests(body, prompt, **how)]
            return await self._answer(request, CompletionFormat, body, requests)
        change = Change(self.sessions, body.session, body.fork)
        try:
            start, learn = await change.start(body.learn)
            requests = self._requests(body, body.prompt[0], keep_session=True, start=start, learn=learn)
            return await self._answer(request, CompletionFormat, body, requests, change)
        except BaseException:
            change.release()
            raise

    async def chat(self, request: HttpRequest) -> ASGIApp:
        body = await self.reader.parse(ChatBody, request.scope[BODY])
        if self.trained.tokenizer.chat_template is None:
            raise ApiError(
                400, "This model has no chat template. Use /v1/completions, or a model made for chat.", "messages"
            )
        messages = [message.rendered() for message in body.messages]
        check_length("".join(message["content"] for message in messages), self.settings.max_prompt, "messages")
        self._check(body, 1)
        try:
            tokens = await self.renderer.run(partial(chat_tokens, self.trained, messages))
        except UsageError as error:
            raise ApiError(400, str(error), "messages") from None
        requests = self._requests(body, tokens, learn=self.trained.learns(body.learn))
        return await self._answer(request, ChatFormat, body, requests)

    async def score(self, request: HttpRequest) -> Response:
        body = await self.reader.parse(ScoreBody, request.scope[BODY])
        self._check_model(body.model)
        check_length(body.text, self.settings.max_prompt, "text")
        sums = await self.scorer.run(partial(score, self.trained, body.text, learn=self.trained.learns(body.learn)))
        per_byte = sums.bits / sums.bytes if sums.bytes else None
        return JSONResponse({"object": "score", "model": self.name, **sums._asdict(), "bits_per_byte": per_byte})

    def _check(self, body: WritingBody, prompts: int) -> None:
        """Refuse a request that asks for another model, too many texts or too many tokens."""
        self._check_model(body.model)
        if prompts * body.n > self.settings.max_choices:
            raise ApiError(400, f"n: a request may ask for at most {self.settings.max_choices} texts.", "n")
        if (body.max_tokens or 0) > self.settings.max_tokens:
            message = f"max_tokens: {body.max_tokens:,} is above {self.settings.max_tokens:,}."
            raise ApiError(400, message, "max_tokens")

    def _requests(self, body: WritingBody, prompt: str | tuple[int, ...], **what: Any) -> list[Request]:
        """Return the scheduler requests of a prompt."""
        most = min(MAX_TOKENS, self.settings.max_tokens) if body.max_tokens is None else body.max_tokens
        how = body.sampling(), most, tuple(body.stop)
        reports = body.stream and body.stream_options.include_progress
        what |= {"alternatives": body.alternatives, "reports": reports}
        return [Request(prompt, *how, draws=(number,), **what) for number in range(body.n)]

    async def _answer(
        self,
        request: HttpRequest,
        kind: type[TextFormat],
        body: WritingBody,
        requests: list[Request],
        change: Change | None = None,
    ) -> ASGIApp:
        """Return the texts of requests, whole or as a stream; `change` is the session that they continue."""
        texts = Texts(self.scheduler, requests, self.settings.lag, self.metrics, change)
        answer = kind(self.trained.tokenizer, body, len(requests), self.name, self.trained.weights_hash)
        return await respond(texts, answer, body.stream, request.state.deadline)


def about(trained: TrainedLanguageModel) -> dict[str, Any]:
    """Return a sentence about a model for the page, and whether it `writes` code or other text. Names of files stay on
    the server."""
    return {"about": sentence(trained), "writes": "code" if _is_code(trained.recipe) else "text"}


def sentence(trained: TrainedModel) -> str:
    """Return how large a model is and what it was trained on."""
    read = f"{trained.trained_tokens:,} tokens" if trained.trained_tokens else "text"
    stdlib = " of Python's standard library" if _is_stdlib(trained.recipe) else ""
    return f"{count_parameters(trained.model):,} parameters, trained on {read}{stdlib}."


def _is_stdlib(recipe: Recipe) -> bool:
    return all(isinstance(source, PythonStdlib) for source in recipe.text.sources)


def _is_code(recipe: Recipe) -> bool:
    return _is_stdlib(recipe) or all(
        isinstance(source, Files) and all(PurePath(path).suffix.lower() in CODE for path in source.paths)
        for source in recipe.text.sources
    )


def make_app(
    trained: TrainedLanguageModel,
    name: str,
    store: SessionStore,
    settings: Settings,
    hosts: Hosts,
    key: str | None = None,
) -> Starlette:
    """Return the application that serves a model under a name, with the sessions of `store`; `app.state.service` is its
    `ModelServer`, which ends with it. Requests must use a host name of `hosts`, and the key if there is one."""
    service = ModelServer(trained, name, store, settings)
    sessions = service.session_api
    routes: Sequence[Endpoint] = [
        ("/v1/completions", "POST", service.completions),
        ("/v1/chat/completions", "POST", service.chat),
        ("/v1/score", "POST", service.score),
        ("/v1/sessions", "GET", sessions.list),
        ("/v1/sessions", "POST", sessions.create),
        ("/v1/sessions/{name}", "GET", sessions.info),
        ("/v1/sessions/{name}", "DELETE", sessions.delete),
        ("/v1/sessions/{name}/append", "POST", sessions.append),
        ("/v1/sessions/{name}/fork", "POST", sessions.fork),
        ("/v1/sessions/{name}/text", "GET", sessions.text),
        ("/v1/sessions/{name}/state", "GET", sessions.download),
    ]
    return application(service, routes, hosts, key, page.routes())


Endpoint = tuple[str, str, Callable[[HttpRequest], Coroutine[Any, Any, ASGIApp]]]
"""A path, its method and its handler."""


def application(
    service: Service, endpoints: Sequence[Endpoint], hosts: Hosts, key: str | None, files: Sequence[Route] = ()
) -> Starlette:
    """Return the application of a service, with its endpoints, those of every service, and `files`."""
    settings = service.settings

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        try:
            yield
        finally:
            service.end()

    def route(path: str, method: str, handler: Callable[[HttpRequest], Coroutine[Any, Any, ASGIApp]]) -> Route:
        async def endpoint(request: HttpRequest) -> ASGIApp:
            try:
                if service.closing and method in ("POST", "DELETE"):
                    raise shutting_down()
                request.state.deadline = Deadline(settings.timeout)
                return await while_connected(request.receive, handler(request), request.state.deadline)
            except Disconnected:
                return Response()
            except Exception as error:
                return api_error(error).response()

        return Route(path, endpoint, methods=[method])

    async def no_route(request: HttpRequest, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        known = dict.fromkeys(route.path for route in routes if route.path.startswith("/v1/") and "{" not in route.path)
        not_found = f"Path not found. Paths of the API: {', '.join(known)}."
        what = f"{request.method} is not supported by this path." if error.status_code == 405 else not_found
        return ApiError(error.status_code, what, headers=error.headers).response()

    routes = [
        route("/v1/models", "GET", service.models),
        route("/v1/models/{name:path}", "GET", service.model),
        *(route(*each) for each in endpoints),
        route("/health", "GET", service.health),
        route("/ready", "GET", service.ready),
        route("/metrics", "GET", service.metrics_text),
        *files,
    ]
    app = Starlette(
        routes=routes,
        lifespan=lifespan,
        middleware=[Middleware(Guard, hosts, key, settings, service.metrics, [route.path for route in routes])],
        exception_handlers={HTTPException: no_route},
    )
    app.router.redirect_slashes = False
    app.state.service = service
    return app
