"""The web page at `/`: hand-written files, served as they are under a strict content security policy."""

import hashlib
import json
from dataclasses import asdict
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lmlong.data.formats.table import MEDIA_TYPES
from lmlong.model.sampling_options import DEFAULTS, LOOP_PENALTY, MAX_TOKENS

KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}

FILES = {
    "/" if path.name == "index.html" else f"/page/{path.name}": path
    for path in sorted(Path(__file__).parent.iterdir())
    if path.suffix in KINDS
}
"""The files by their URL paths."""

POLICY = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "frame-ancestors 'none'",
        "base-uri 'none'",
        "form-action 'none'",
        "require-trusted-types-for 'script'",  # text of a model or a user cannot become markup
        "trusted-types 'none'",
    ]
)

HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",  # revalidated by its ETag
}


def content(file: Path) -> bytes:
    """Return the content of a file; the page itself gets the sampling defaults and the media types of files."""
    data = file.read_bytes()
    if file.suffix != ".html":
        return data
    values: dict[str, Any] = asdict(DEFAULTS) | {"loop_penalty": LOOP_PENALTY, "max_tokens": MAX_TOKENS}
    values["media_types"] = escape(json.dumps(MEDIA_TYPES))
    return Template(data.decode()).substitute(values).encode()


def routes() -> list[Route]:
    return [_route(path, file) for path, file in FILES.items()]


def _route(path: str, file: Path) -> Route:
    data = content(file)
    headers = {**HEADERS, "ETag": f'"{hashlib.sha256(data).hexdigest()[:32]}"'}

    async def endpoint(request: Request) -> Response:
        known = {tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")}
        if headers["ETag"] in known:
            return Response(status_code=304, headers=headers)
        return Response(data, media_type=KINDS[file.suffix], headers=headers)

    return Route(path, endpoint, methods=["GET"])
