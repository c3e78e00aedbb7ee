"""Errors of the HTTP interface, in the shape of OpenAI's."""

import logging
from collections.abc import Callable, Mapping
from typing import Any

from starlette.responses import JSONResponse

from lmlong.data.tokenizers.base import CannotEncode
from lmlong.data.tokenizers.characters import UnknownCharacter
from lmlong.errors import CheckpointError
from lmlong.model.finite import NotFinite

LOG = logging.getLogger("lmlong.serving")

RETRY_SECONDS = "1"

LONGEST_MESSAGE = 500
"""Maximum length of an error message, which may quote the request."""


class ApiError(Exception):
    """An error response; `param` is the field of the request that causes it."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        message = _shortened(message)
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.headers = status, message, param, code, headers

    @property
    def body(self) -> dict[str, Any]:
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        kind = "rate_limit_error" if self.status == 429 else kind
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body, self.status, self.headers)


def _shortened(message: str) -> str:
    """Shorten a message, and replace characters that UTF-8 cannot encode."""
    if len(message) > LONGEST_MESSAGE:
        half = LONGEST_MESSAGE // 2  # the end has the remedy
        message = f"{message[:half]} ... {message[-half:]}"
    return message.encode(errors="replace").decode()


def busy(message: str) -> ApiError:
    return ApiError(429, message, code="rate_limit_exceeded", headers={"Retry-After": RETRY_SECONDS})


def shutting_down() -> ApiError:
    return ApiError(503, "The server is shutting down.", code="shutting_down", headers={"Retry-After": RETRY_SECONDS})


def not_ready(message: str) -> ApiError:
    return ApiError(503, message, code="not_ready")


def scheduler_failed() -> ApiError:
    return not_ready("The scheduler has failed; the log says where. Restart the server.")


def timed_out(seconds: float) -> ApiError:
    return ApiError(504, f"The request took more than {seconds:g} seconds. Ask for fewer tokens.", code="timeout")


RESPONSES: dict[type[Exception], Callable[[Any], ApiError]] = {
    CannotEncode: lambda error: ApiError(400, str(error)),
    UnknownCharacter: lambda error: ApiError(400, error.to_client),
    NotFinite: lambda error: ApiError(503, str(error), code="model_unusable"),
    CheckpointError: lambda error: ApiError(410, "The file of this session is damaged.", "session", "session_damaged"),
}
"""The responses to errors of other packages."""


def api_error(error: BaseException) -> ApiError:
    """Return an exception as an error response. The message of an unexpected exception is neither sent nor logged,
    since it may contain text of a request, or paths."""
    if isinstance(error, ApiError):
        return error
    for kind, response in RESPONSES.items():
        if isinstance(error, kind):
            return response(error)
    error = error.__cause__ or error
    frame, where = error.__traceback__, "unknown"
    while frame is not None:
        code = frame.tb_frame.f_code
        where, frame = f"{code.co_filename}:{frame.tb_lineno} in {code.co_name}", frame.tb_next
    LOG.error("a request failed: %s at %s", type(error).__name__, where)
    return ApiError(500, "The request failed in the server. Its log says where.", code="internal_error")
