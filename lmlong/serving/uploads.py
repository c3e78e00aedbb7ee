"""Uploaded documents and compressed files: a process of their own makes text of them, one at a time."""

from functools import partial
from pathlib import PurePath

from lmlong.data.formats.table import format_of
from lmlong.io.limited_process import LimitedProcess, RequestFailed
from lmlong.serving.api_errors import ApiError
from lmlong.serving.aside import Ended, Worker
from lmlong.serving.bodies import text_of_file
from lmlong.serving.engine import Closed
from lmlong.serving.limits import Limits

SECONDS = 60.0
"""Time that a file may take, the start of the process among it."""

WIDEST = 4
"""Bytes of UTF-32 for one of UTF-8."""


class Uploads:
    """Makes text of files in bounded time and memory; a few wait, and their owners take turns."""

    def __init__(self, limits: Limits, owners: int = 1):
        self.worker = Worker("lmlong-uploads", limits.aside, owners)
        self.process = LimitedProcess("lmlong.serving.upload_worker")
        self._longest = WIDEST * (limits.prompt + 1)  # room for a byte order mark

    async def text(self, data: bytes, suffix: str, owner: str) -> str:
        """Return the text of a file of a kind that `suffix` names; raise a 400 with the reason if it has none."""
        return await self.worker.run(partial(self._text, data, suffix), owner)

    def _text(self, data: bytes, suffix: str, ended: Ended) -> str:
        if reason := format_of(PurePath(f"upload{suffix}")).refusal:
            raise _not_read(suffix, reason)
        try:
            text = self.process.ask({"suffix": suffix, "longest": self._longest}, SECONDS, data)
        except RequestFailed as error:
            if ended():  # which ends the process too
                raise Closed("The server is shutting down.") from None
            raise _not_read(suffix, str(error)) from None
        return text_of_file(text)


def _not_read(suffix: str, reason: str) -> ApiError:
    kind = suffix.removeprefix(".").upper()
    return ApiError(
        400, f"The file cannot be read as {kind} ({reason}). Send another file, or its text.", code="invalid_file"
    )
