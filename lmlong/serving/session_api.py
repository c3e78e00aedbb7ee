"""The sessions API: create, append to, fork, list, download and delete sessions."""

from collections.abc import Callable
from typing import TypeVar

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from lmlong.data.formats.table import SUFFIXES, suffix_of_bytes
from lmlong.serving.answers import Usage, session_body
from lmlong.serving.bodies import NoBody, TextBody
from lmlong.serving.engine import Engine
from lmlong.serving.guard import BODY, OWNER, STATE, media_type
from lmlong.serving.inbox import Texts
from lmlong.serving.limits import Limits, check_prompt
from lmlong.serving.metrics import Metrics
from lmlong.serving.parser import Parser
from lmlong.serving.request import Request
from lmlong.serving.session_change import Sessions
from lmlong.serving.streaming import Deadline, while_connected, written
from lmlong.serving.uploads import Uploads

Result = TypeVar("Result")


class SessionApi:
    """The handlers of /v1/sessions."""

    def __init__(
        self, sessions: Sessions, engine: Engine, parser: Parser, uploads: Uploads, limits: Limits, metrics: Metrics
    ):
        self._sessions, self._engine, self._parser, self._uploads = sessions, engine, parser, uploads
        self._limits, self._metrics = limits, metrics

    async def create(self, request: HttpRequest) -> Response:
        if media_type(request.headers) == STATE:
            upload = self._sessions.store.upload
            info = await self._sessions.run(upload, request.scope[OWNER], request.scope[BODY])
            return JSONResponse(session_body(info), 201)
        return await self._read(request, None, 201)

    async def append(self, request: HttpRequest) -> Response:
        return await self._read(request, request.path_params["name"], 200)

    async def fork(self, request: HttpRequest) -> Response:
        await self._parser.parse(NoBody, request.scope[BODY], request.scope[OWNER])
        return JSONResponse(session_body(await self._run(self._sessions.store.fork, request)), 201)

    async def list(self, request: HttpRequest) -> Response:
        infos = await self._sessions.run(self._sessions.store.list, request.scope[OWNER])
        return JSONResponse({"object": "list", "data": list(map(session_body, infos))})

    async def info(self, request: HttpRequest) -> Response:
        return JSONResponse(session_body(await self._run(self._sessions.store.info, request)))

    async def download(self, request: HttpRequest) -> Response:
        name = request.path_params["name"]
        data = await self._run(self._sessions.store.file, request)
        headers = {"Content-Disposition": f'attachment; filename="{name}.state"'}
        return Response(data, media_type=STATE, headers=headers)

    async def delete(self, request: HttpRequest) -> Response:
        name = request.path_params["name"]
        change = self._sessions.change(request.scope[OWNER], name)
        try:
            await self._run(self._sessions.store.delete, request)
        finally:
            change.release()
        return JSONResponse({"id": name, "object": "session.deleted", "deleted": True})

    async def _run(self, call: Callable[[str, str], Result], request: HttpRequest) -> Result:
        return await self._sessions.run(call, request.scope[OWNER], request.path_params["name"])

    async def _read(self, request: HttpRequest, name: str | None, status: int) -> Response:
        """Read a text after a session, or as a new one."""
        deadline, owner, body = Deadline(self._limits.timeout), request.scope[OWNER], request.scope[BODY]
        kind = media_type(request.headers)
        if kind == "application/json":
            text = (await self._parser.parse(TextBody, body, owner)).text
        elif suffix := SUFFIXES.get(kind) or suffix_of_bytes(body):
            converted = await while_connected(request.receive, self._uploads.text(body, suffix, owner), deadline)
            if converted is None:
                return Response()
            text = converted
        else:
            text = await self._parser.text_of_file(body, owner)
        check_prompt(self._limits, text, "text")
        change = self._sessions.change(owner, name)
        try:
            engine_request = Request(text, max_tokens=0, start=await change.start(), owner=owner, keep_session=True)
            texts = Texts(self._engine, [engine_request], self._limits.lag, self._metrics, change)
        except BaseException:
            change.release()
            raise
        try:
            result = await while_connected(request.receive, written(texts, Usage(1)), deadline)
        finally:
            texts.close()
        session = result and result.session
        return JSONResponse(session_body(session), status) if session else Response()
