"""A small server with the interface of the Hugging Face Hub that huggingface_hub calls for files of data sets."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha1, sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path, PurePosixPath
from threading import Thread
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
from huggingface_hub import constants

from lmlong.data.hub import COMMITS

NAME = "owner/set"
URL = f"hf://datasets/{NAME}"

PAGE = 3
"""Entries of a folder in one answer."""


@dataclass
class Repository:
    """A data set: the files of each commit, and the commits of its branches."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    gated: bool = False

    def commit(self, files: Mapping[str, bytes], branch: str = "main") -> str:
        """Add a commit with these files, and move a branch to it."""
        commit = sha1(f"{len(self.commits)} {sorted(files)}".encode()).hexdigest()
        self.commits[commit], self.branches[branch] = dict(files), commit
        return commit


@dataclass
class Hub:
    """The state of a server."""

    repositories: dict[str, Repository] = field(default_factory=lambda: {NAME: Repository()})
    log: list[str] = field(default_factory=list)  # "METHOD path" of each request
    bytes_until_cut: int | None = None  # after which the next download is cut off
    listed: dict[str, Any] = field(default_factory=dict)  # other names that listings give to paths
    url: str = ""

    def downloads(self) -> list[str]:
        """Return the names of the files whose content was sent."""
        return [PurePosixPath(line).name for line in self.log if line.startswith("GET /content/")]


@contextmanager
def serving() -> Iterator[Hub]:
    """Run a server while the context lasts."""
    served = Hub()

    class Handler(_Handler):
        state = served

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    served.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield served
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def connect(url: str, cache: Path, patch: pytest.MonkeyPatch) -> None:
    """Let this process read the hub at an address, by a cache."""
    patch.setattr(constants, "HF_HUB_CACHE", str(cache))
    patch.setattr(constants, "ENDPOINT", url)
    patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
    forget(patch)


def forget(patch: pytest.MonkeyPatch) -> None:
    """Forget what this process knows of the hub, as a new process would."""
    patch.setenv(COMMITS, "{}")


class _Handler(BaseHTTPRequestHandler):
    state: Hub

    def log_message(self, *words: object) -> None:
        pass

    def do_GET(self) -> None:
        address = urlsplit(self.path)
        parts = [unquote(part) for part in address.path.strip("/").split("/")]
        self.state.log.append(f"{self.command} {unquote(address.path)}")
        if len(parts) < 4:
            return self._error(404, "EntryNotFound")
        kind, owner, name, what, *rest = parts[1:] if parts[0] == "api" else parts
        repository = self.state.repositories.get(f"{owner}/{name}")
        if repository is None:
            return self._error(401, "RepoNotFound")
        commit = repository.branches.get(rest[0], rest[0])
        if commit not in repository.commits:
            return self._error(404, "RevisionNotFound")
        files, path = repository.commits[commit], "/".join(rest[1:])
        if what == "revision":
            return self._send(json.dumps({"id": f"{owner}/{name}", "sha": commit}).encode())
        if what == "tree":
            return self._tree(files, path, parse_qs(address.query))
        if repository.gated and kind != "content" and "authorization" not in self.headers:
            return self._error(403, "GatedRepo")
        if path not in files:
            return self._error(404, "EntryNotFound")
        if kind == "content":
            return self._content(files[path])
        content = self.state.url.replace("127.0.0.1", "localhost") + "/content"
        about = {
            "Location": f"{content}/{owner}/{name}/resolve/{commit}/{path}",
            "X-Repo-Commit": commit,
            "X-Linked-Etag": f'"{sha256(files[path]).hexdigest()}"',
            "X-Linked-Size": str(len(files[path])),
        }
        self._send(b"", 302, about)

    do_HEAD = do_GET

    def _tree(self, files: Mapping[str, bytes], folder: str, query: Mapping[str, list[str]]) -> None:
        folders = {str(path) for name in files for path in PurePosixPath(name).parents} - {"."}
        inside = [name for name in sorted(folders | files.keys()) if not folder or name.startswith(f"{folder}/")]
        if not inside:
            return self._error(404, "EntryNotFound")
        recursive, start = query.get("recursive", ["False"])[0], int(query.get("cursor", ["0"])[0])
        if recursive.lower() != "true":
            inside = [name for name in inside if str(PurePosixPath(name).parent) == (folder or ".")]
        entries = [
            {
                "type": "file" if name in files else "directory",
                "path": self.state.listed.get(name, name),
                "size": len(files.get(name, b"")),
                "oid": "0" * 40,
            }
            for name in inside[start : start + PAGE]
        ]
        address = f"{self.state.url}{urlsplit(self.path).path}?recursive={recursive}&cursor={start + PAGE}"
        more = {"Link": f'<{address}>; rel="next"'} if inside[start + PAGE :] else {}
        self._send(json.dumps(entries).encode(), headers={**more, "Content-Type": "application/json"})

    def _content(self, data: bytes) -> None:
        start = int(self.headers["Range"].removeprefix("bytes=").rstrip("-")) if "Range" in self.headers else 0
        about = {"Content-Range": f"bytes {start}-{len(data) - 1}/{len(data)}"} if start else {}
        cut, self.state.bytes_until_cut = self.state.bytes_until_cut, None
        self._send(data[start:], 206 if start else 200, about, cut)
        self.close_connection = True

    def _error(self, status: int, code: str) -> None:
        self._send(b"", status, {"X-Error-Code": code, "X-Error-Message": code})

    def _send(
        self, data: bytes, status: int = 200, headers: Mapping[str, str] | None = None, sent: int | None = None
    ) -> None:
        """Answer with data, of which `sent` bytes are sent, or all."""
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data[:sent])
