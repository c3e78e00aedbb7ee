"""Bodies of requests, read beside the event loop, so that a large one does not delay other clients."""

from typing import TypeVar

from lmlong.serving import bodies
from lmlong.serving.aside import Worker

SMALL = 16 << 10
"""Bytes of a body that is read at once, in less time than a thread takes to be asked."""

AnyBody = TypeVar("AnyBody", bound=bodies.Body)


class Parser:
    """Reads large bodies one at a time, in a thread; up to `waiting` of them wait, and their owners take turns."""

    def __init__(self, waiting: int, owners: int = 1):
        self.worker = Worker("lmlong-parser", waiting, owners)

    async def parse(self, kind: type[AnyBody], data: bytes, owner: str) -> AnyBody:
        """Return the body that JSON holds; a 400 that names what is wrong with it."""
        if len(data) <= SMALL:
            return bodies.parse(kind, data)
        return await self.worker.run(lambda _: bodies.parse(kind, data), owner)

    async def text_of_file(self, data: bytes, owner: str) -> str:
        """Return the text of a plain text file."""
        return await self.worker.run(lambda _: bodies.text_of_file(data), owner)
