"""The sessions API: create, append to, fork, list, download and delete sessions."""

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp

from lmlong.serving.answers import SessionFormat, text_body
from lmlong.serving.bodies import FileQuery, ListQuery, NoBody, TextQuery, check_length, parse_query
from lmlong.serving.body_reader import BodyReader
from lmlong.serving.guard import BODY, STATE, media_type
from lmlong.serving.inbox import Texts
from lmlong.serving.metrics import Metrics
from lmlong.serving.request import Request
from lmlong.serving.scheduler import Scheduler
from lmlong.serving.session_change import Change, Sessions
from lmlong.serving.session_text import Passage
from lmlong.serving.settings import Settings
from lmlong.serving.streaming import respond
from lmlong.serving.worker import Ended, Worker

Result = TypeVar("Result")


class SessionApi:
    """The handlers of /v1/sessions."""

    def __init__(
        self,
        sessions: Sessions,
        scheduler: Scheduler,
        reader: BodyReader,
        scorer: Worker,
        settings: Settings,
        metrics: Metrics,
    ):
        self._sessions, self._scheduler, self._reader, self._scorer = sessions, scheduler, reader, scorer
        self._settings, self._metrics = settings, metrics

    async def create(self, request: HttpRequest) -> ASGIApp:
        if media_type(request.headers) == STATE:
            upload, learn = self._sessions.store.upload, parse_query(FileQuery, request.query_params).learn
            info = await self._run(upload, request.scope[BODY], learn)
            return JSONResponse(info._asdict(), 201)
        return await self.append(request)

    async def append(self, request: HttpRequest) -> ASGIApp:
        """Read the text in the body after a session, or without a name as a new one."""
        name = request.path_params.get("name")
        body = await self._reader.text(request.scope[BODY], media_type(request.headers), request.query_params)
        check_length(body.text, self._settings.max_prompt, "text")
        change = Change(self._sessions, name)
        try:
            start, learn = await change.start(body.learn)
            reading = Request(body.text, max_tokens=0, start=start, learn=learn, reports=body.stream, keep_session=True)
            texts = Texts(self._scheduler, [reading], self._settings.lag, self._metrics, change)
        except BaseException:
            change.release()
            raise
        return await respond(texts, SessionFormat(), body.stream, request.state.deadline, 201 if name is None else 200)

    async def fork(self, request: HttpRequest) -> Response:
        await self._reader.parse(NoBody, request.scope[BODY] or b"{}")
        return JSONResponse((await self._run(self._sessions.store.fork, request.path_params["name"]))._asdict(), 201)

    async def list(self, request: HttpRequest) -> Response:
        query = parse_query(ListQuery, request.query_params)
        infos, rest = await self._sessions.run(self._sessions.store.page, query.limit, query.after)
        data = [info._asdict() for info in infos]
        return JSONResponse({"object": "list", "data": data, "has_more": rest is not None, "next": rest})

    async def info(self, request: HttpRequest) -> Response:
        return JSONResponse((await self._run(self._sessions.store.info, request.path_params["name"]))._asdict())

    async def text(self, request: HttpRequest) -> Response:
        """Answer with the text that a session adds to its parent's."""
        trained, name = self._sessions.store.trained, request.path_params["name"]
        alternatives = parse_query(TextQuery, request.query_params).logprobs
        own = await self._sessions.read(self._sessions.store.text, name, alternatives is not None)

        def passages(ended: Ended) -> list[Passage]:
            return own.passages(trained, alternatives or 0, ended)

        return JSONResponse(text_body(name, await self._scorer.run(passages), trained.tokenizer))

    async def download(self, request: HttpRequest) -> Response:
        name = request.path_params["name"]
        data = await self._sessions.read(self._sessions.store.download, name)
        headers = {"Content-Disposition": f'attachment; filename="{name}.state"'}
        return Response(data, media_type=STATE, headers=headers)

    async def delete(self, request: HttpRequest) -> Response:
        name = request.path_params["name"]
        change = Change(self._sessions, name)
        try:
            await self._run(self._sessions.store.folder.delete, name)
        finally:
            change.release()
        return JSONResponse({"id": name, "object": "session.deleted", "deleted": True})

    async def _run(self, call: Callable[..., Result], *what: Any) -> Result:
        """Return the result of a method of the store, which ends its work even if the client leaves."""
        return await asyncio.shield(self._sessions.run(call, *what))
