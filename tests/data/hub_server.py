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

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def log_message(self, *words: object) -> None:
        pass

    def _answer(self) -> None:
        address = urlsplit(self.path)
        parts = [unquote(part) for part in address.path.strip("/").split("/")]
        self.state.log.append(f"{self.command} {unquote(address.path)}")
        is_api = parts[0] == "api"
        if len(parts) < 4:
            return self._error(404, "EntryNotFound")
        kind, owner, name, what, *rest = parts[1:] if is_api else parts
        repository = self.state.repositories.get(f"{owner}/{name}")
        if repository is None:
            return self._error(401, "RepoNotFound")
        commit = repository.branches.get(rest[0], rest[0])
        if commit not in repository.commits:
            return self._error(404, "RevisionNotFound")
        files, path = repository.commits[commit], "/".join(rest[1:])
        if what == "revision":
            return self._send_json({"id": f"{owner}/{name}", "sha": commit})
        if what == "tree":
            return self._tree(files, path, parse_qs(address.query))
        if repository.gated and kind != "content" and "authorization" not in self.headers:
            return self._error(403, "GatedRepo")
        if path not in files:
            return self._error(404, "EntryNotFound")
        if kind == "content":
            return self._content(files[path])
        digest = sha256(files[path]).hexdigest()
        self.send_response(302)
        self.send_header(
            "Location",
            f"{self.state.url.replace('127.0.0.1', 'localhost')}/content/{owner}/{name}/resolve/{commit}/{path}",
        )
        self.send_header("X-Repo-Commit", commit)
        self.send_header("X-Linked-Etag", f'"{digest}"')
        self.send_header("X-Linked-Size", str(len(files[path])))
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _tree(self, files: Mapping[str, bytes], folder: str, query: Mapping[str, list[str]]) -> None:
        folders = {str(path) for name in files for path in PurePosixPath(name).parents} - {"."}
        inside = [name for name in sorted(folders | files.keys()) if not folder or name.startswith(f"{folder}/")]
        if not inside:
            return self._error(404, "EntryNotFound")
        if query.get("recursive", ["False"])[0].lower() != "true":
            inside = [name for name in inside if str(PurePosixPath(name).parent) == (folder or ".")]
        start = int(query.get("cursor", ["0"])[0])
        entries = [
            {"type": "file", "path": self.state.listed.get(name, name), "size": len(files[name]), "oid": "0" * 40}
            if name in files
            else {"type": "directory", "path": name, "size": 0, "oid": "0" * 40}
            for name in inside[start : start + PAGE]
        ]
        query_again = f"recursive={query.get('recursive', ['False'])[0]}&cursor={start + PAGE}"
        after = f'<{self.state.url}{urlsplit(self.path).path}?{query_again}>; rel="next"'
        self._send_json(entries, {"Link": after} if inside[start + PAGE :] else {})

    def _content(self, data: bytes) -> None:
        served = self.state
        start = int(self.headers["Range"].removeprefix("bytes=").rstrip("-")) if "Range" in self.headers else 0
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.send_header("Content-Length", str(len(data) - start))
        self.end_headers()
        cut, served.bytes_until_cut = served.bytes_until_cut, None
        self.wfile.write(data[start:] if cut is None else data[start : start + cut])
        self.close_connection = True

    def _send_json(self, content: object, headers: Mapping[str, str] | None = None) -> None:
        data = json.dumps(content).encode()
        self.send_response(200)
        for name, value in {**(headers or {}), "Content-Type": "application/json"}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _error(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", code)
        self.send_header("Content-Length", "0")
        self.end_headers()
