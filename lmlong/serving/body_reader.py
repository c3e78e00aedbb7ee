"""Request bodies, read beside the event loop, so that a large one does not delay other clients."""

from collections.abc import Mapping
from functools import partial
from pathlib import PurePath

from lmlong.data.formats.table import SUFFIXES, format_of, suffix_of_bytes
from lmlong.io.limited_process import LimitedProcess, RequestFailed
from lmlong.serving.api_errors import ApiError, shutting_down
from lmlong.serving.bodies import AnyBody, FileQuery, TextBody, parse, parse_query, text_of_file
from lmlong.serving.settings import Settings
from lmlong.serving.worker import Ended, Worker

SMALL = 16 << 10
"""Bytes of a JSON body that is parsed in the event loop, which takes less time than to hand it to a thread."""

SECONDS = 60.0
"""Time limit of converting a file, including the start of the process that converts."""

WIDEST = 4
"""Bytes of UTF-32 for one of UTF-8."""


class BodyReader:
    """Parses JSON in one thread; converts documents and compressed files in a process, with limited time and memory."""

    def __init__(self, settings: Settings):
        self.parser = Worker("lmlong-parser", settings.waiting)
        self.converter = Worker("lmlong-uploads", settings.jobs)
        self.process = LimitedProcess("lmlong.serving.upload_worker")
        self._longest = WIDEST * (settings.max_prompt + 1)  # room for a byte order mark

    async def parse(self, kind: type[AnyBody], data: bytes) -> AnyBody:
        """Return the body in a JSON text; raise a 400 that names what is wrong with it."""
        if len(data) <= SMALL:
            return parse(kind, data)
        return await self.parser.run(lambda _: parse(kind, data))

    async def text(self, data: bytes, media_type: str, query: Mapping[str, str]) -> TextBody:
        """Return the text of a body of any kind: JSON, plain text, a document or a compressed file."""
        if media_type == "application/json":
            return await self.parse(TextBody, data)
        options = parse_query(FileQuery, query)
        if suffix := SUFFIXES.get(media_type) or suffix_of_bytes(data):
            text = await self.converter.run(partial(self._convert, data, suffix))
        else:
            text = await self.parser.run(lambda _: text_of_file(data))
        return TextBody.model_construct(text=text, **dict(options))

    def _convert(self, data: bytes, suffix: str, ended: Ended) -> str:
        if reason := format_of(PurePath(f"upload{suffix}")).refusal:
            raise _unreadable(suffix, reason)
        try:
            text = self.process.ask({"suffix": suffix, "longest": self._longest}, SECONDS, data)
        except RequestFailed as error:
            if ended():  # `close` has killed the process
                raise shutting_down() from None
            raise _unreadable(suffix, str(error)) from None
        return text_of_file(text)


def _unreadable(suffix: str, reason: str) -> ApiError:
    kind = suffix.removeprefix(".").upper()
    message = f"The file cannot be read as {kind} ({reason}). Send another file, or its text."
    return ApiError(400, message, code="invalid_file")
