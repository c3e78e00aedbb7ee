"""The program that renders chat templates in a `LimitedProcess`: a template of an imported model may loop indefinitely,
or build gigabytes of text.

It imports as little as possible, so that it starts quickly.
"""

from functools import lru_cache
from typing import Any, NoReturn

from jinja2 import Template, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from lmlong.io.limited_process import answer_requests

MEMORY = 1 << 30
"""Bytes of address space."""

ALLOWED_EXTRA = 16 << 20
"""Characters that a template may produce beyond four times those of the messages."""


def render(request: dict[str, Any]) -> bytes:
    """Return the text that `template` renders from `messages` and the names of the tokens in `ends`."""
    messages = request["messages"]
    limit = ALLOWED_EXTRA + 4 * sum(len(text) for message in messages for text in message.values())
    pieces, size = [], 0
    template = _compiled(request["template"])
    for piece in template.generate(messages=messages, add_generation_prompt=True, **request["ends"]):
        size += len(piece)
        if size > limit:
            raise TemplateError(f"it renders more than {limit:,} characters")
        pieces.append(piece)
    return "".join(pieces).encode("utf-8", "surrogatepass")


@lru_cache(maxsize=4)
def _compiled(template: str) -> Template:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = _refuse
    return environment.from_string(template)


def _refuse(why: str) -> NoReturn:
    raise TemplateError(why)


if __name__ == "__main__":
    answer_requests(render, MEMORY, (TemplateError,))
