"""`lmlong serve`: what it tells, how it ends, and what it keeps to itself."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from commands import lmlong
from data.made_documents import epub
from models import write_run
from serving.request_draws import ENDLESS
from serving.schedulers import tiny
from serving.servers import NAME, served, until

from lmlong.serving.server import locked

ROOT = Path(__file__).parent.parent.parent
KEY = {"Authorization": "Bearer a-secret"}
FILES = 300
"""Files that the server may open."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    write_run(folder)
    return folder


@contextmanager
def serving(folder: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The command as a process, which gets signals and has limits and a command line of its own; and its address."""
    code = f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (200, {FILES})); "
    code += "from lmlong.cli.main import main; main()"
    words = [sys.executable, "-c", code, "serve", "tiny", "--port", "0", "--max-tokens", "1m", *options]
    environment = {**os.environ, "LMLONG_API_KEY": "a-secret"}
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=environment, cwd=folder)
    try:
        assert process.stderr is not None
        lines = []
        while "rows, decodes by" not in (line := process.stderr.readline()):
            assert line, lines
            lines.append(line)
        yield process, line.split()[-1]
    finally:
        process.kill()
        process.communicate(timeout=30)


def test_a_server_from_its_start_to_a_signal(run: Path, tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "tiny").symlink_to(run)
    with (
        serving(tmp_path, "--grace", "0.5") as (process, address),
        httpx.Client(base_url=address, headers=KEY, timeout=60) as client,
    ):
        assert httpx.get(f"{address}/v1/models").status_code == 401
        assert client.get("/v1/models").json()["data"][0]["id"] == "tiny"
        client.post("/v1/sessions", json={"text": "a book"}).raise_for_status()
        assert list((run.parent / "tiny-sessions").glob("*.session")), "beside the run, by whatever name it is served"
        assert not list(tmp_path.rglob("*-sessions"))
        if sys.platform == "linux":
            limits = Path(f"/proc/{process.pid}/limits").read_text()
            assert re.search(rf"Max open files +{FILES} +{FILES} ", limits), "as many as the system allows"
        with client.stream("POST", "/v1/completions", json=ENDLESS) as stream:
            lines = stream.iter_lines()
            assert next(lines).startswith("data: ")
            process.send_signal(signal.SIGTERM)
            *_, last = (line for line in lines if line)
            assert "shutting_down" in last
        assert process.wait(30) == 143
        assert process.stderr is not None and process.stderr.read() == f"stopped; sessions are in {run}-sessions\n"


def test_a_second_signal_ends_it_at_once(run: Path) -> None:
    with (
        serving(run.parent, "--grace", "300") as (process, address),
        httpx.stream("POST", f"{address}/v1/completions", json=ENDLESS, headers=KEY) as stream,
    ):
        lines = stream.iter_lines()
        assert next(lines)
        process.send_signal(signal.SIGTERM)
        until(lambda: not listens(address))
        assert next(lines) is not None and process.poll() is None
        process.send_signal(signal.SIGINT)
        with pytest.raises(httpx.RemoteProtocolError):  # the stream is cut, where it would end by itself later
            list(lines)
        assert process.wait(10) == 130


def listens(address: str) -> bool:
    try:
        return httpx.get(f"{address}/health").status_code == 200
    except httpx.TransportError:  # it may also close a connection that it has just accepted
        return False


def test_a_mistake_is_one_message(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LMLONG_API_KEY", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for options, told in [
            (["--port", port], rf"--port: {port} of 127.0.0.1 cannot be had \(Address already in use\)"),
            (["--host", "no.such.host.invalid"], r"--host: no.such.host.invalid is no address here"),
            (["--host", "203.0.113.7"], r"--host: 203.0.113.7 is not an address of this machine"),
        ]:
            done = lmlong("serve", run, *options)
            assert done.returncode == 2 and re.search(told, done.stderr), done
            assert done.stderr.count("\n") == 1
    monkeypatch.setenv("LMLONG_API_KEY", "a b")
    assert "LMLONG_API_KEY: a key consists of printable ASCII" in lmlong("serve", run).stderr
    for option, unit in (("--rows", "10k"), ("--max-tokens", "0"), ("--grace", "-1"), ("--max-prompt", "-1")):
        done = lmlong("serve", run, option, unit)
        assert done.returncode == 2 and option in done.stderr


def test_a_folder_of_another_server_is_refused_before_a_model_is_loaded(run: Path, tmp_path: Path) -> None:
    damaged, folder = shutil.copytree(run, tmp_path / "damaged"), tmp_path / "sessions"
    next(damaged.rglob("model.safetensors")).write_bytes(b"damaged")
    with locked(folder):
        done = lmlong("serve", damaged, "--port", "0", "--sessions", folder)
    assert done.returncode == 2 and "another server keeps its sessions there" in done.stderr
    missing = lmlong("serve", tmp_path / "missing", "--port", "0")
    assert missing.returncode == 4 and "no such run" in missing.stderr and len(list(tmp_path.iterdir())) == 2


def test_without_its_libraries_it_says_what_to_install(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, "lmlong.serving.server", raising=False)
    done = lmlong("serve", run)
    assert done.returncode == 2 and "pip install -e '.[serve]'" in done.stderr


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
def test_every_curl_line_of_the_pages_works(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("a book of a few words. " * 50)
    (tmp_path / "book.epub").write_bytes(epub())
    session = "none"
    pages = [ROOT / "docs" / "guides" / "serve.md", ROOT / "docs" / "tutorials" / "serve-a-model.md"]
    text = "\n".join(page.read_text() for page in pages)
    blocks = re.findall(r"^```sh\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines() if line.startswith("curl ")]
    assert len(lines) >= 4
    with served(tiny()) as server:
        for line in lines:
            assert "http://localhost:8000/" in line
            command = line.replace("http://localhost:8000", server.url).replace("quickstart", NAME)
            command = re.sub(r"\bID\b", session, command)
            found = subprocess.run(
                command, shell=True, capture_output=True, text=True, timeout=60, check=True, cwd=tmp_path
            )
            assert found.stdout and '"error"' not in found.stdout, found.stdout
            session = (re.findall(r'"id":"([0-9a-f]{24})"', found.stdout) or [session])[0]
