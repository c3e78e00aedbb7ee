"""`lmlong serve`: what it tells, how it ends, and what it keeps to itself."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from data.made_documents import epub
from interop.exported import write_run
from serving.chats import chatting
from serving.servers import until

from lmlong.cli import main as cli
from lmlong.cli.serve import read_keys

ROOT = Path(__file__).parent.parent.parent
ENDLESS = {"prompt": "a", "max_tokens": 1 << 20, "temperature": 0, "stream": True}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    write_run(folder)
    return folder


@contextmanager
def serving(
    run: Path | str,
    *options: str,
    python: tuple[str, ...] = ("-m", "lmlong"),
    cwd: Path | None = None,
    **environment: str,
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The command as a process, and the address that it tells."""
    words = [sys.executable, *python, "serve", str(run), "--port", "0", *options]
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env={**os.environ, **environment}, cwd=cwd)
    try:
        assert process.stderr is not None
        lines = []
        while "rows, decodes by" not in (line := process.stderr.readline()):
            assert line, lines
            lines.append(line)
        yield process, line.partition(": ")[0]
    finally:
        process.kill()
        process.communicate(timeout=30)


def test_a_signal_ends_the_streams_that_take_longer_than_the_grace(run: Path) -> None:
    with serving(run, "--grace", "0.5", "--max-tokens", "1m") as (process, address):
        with httpx.stream("POST", f"{address}/v1/completions", json=ENDLESS, timeout=60) as stream:
            lines = stream.iter_lines()
            assert next(lines).startswith("data: ")
            process.send_signal(signal.SIGTERM)
            sent = time.monotonic()
            *_, last = (line for line in lines if line)
            assert "shutting_down" in last and time.monotonic() - sent >= 0.5
        assert process.wait(30) == 143
        assert process.stderr is not None and process.stderr.read() == ""


def test_what_takes_no_longer_than_the_grace_is_finished(run: Path) -> None:
    with serving(run, "--grace", "300", "--max-tokens", "1m") as (process, address):
        with httpx.stream("POST", f"{address}/v1/completions", json={**ENDLESS, "max_tokens": 3000}) as stream:
            lines = stream.iter_lines()
            assert next(lines)
            process.send_signal(signal.SIGINT)
            *_, last = (line for line in lines if line)
            assert last == "data: [DONE]"
        assert process.wait(30) == 130


def test_a_second_signal_ends_it_at_once(run: Path) -> None:
    with (
        serving(run, "--grace", "300", "--max-tokens", "1m") as (process, address),
        httpx.stream("POST", f"{address}/v1/completions", json=ENDLESS) as stream,
    ):
        lines = stream.iter_lines()
        assert next(lines)
        process.send_signal(signal.SIGTERM)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(1)
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 143


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="only Linux tells the children of a process")
def test_a_chat_template_that_loops_keeps_no_server_alive(tmp_path: Path) -> None:
    chatting(tmp_path, "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}")
    body = {"messages": [{"role": "user", "content": "a"}]}
    answers: list[httpx.Response] = []
    with serving(tmp_path / "run", "--grace", "0.5") as (process, address):
        ask = lambda: answers.append(httpx.post(f"{address}/v1/chat/completions", json=body, timeout=60))  # noqa: E731
        asking = threading.Thread(target=ask)
        asking.start()
        children = lambda: (path.read_text() for path in Path("/proc").glob(f"{process.pid}/task/*/children"))  # noqa: E731
        until(lambda: any(children()))
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 143
        asking.join(30)
    assert answers[0].status_code == 503


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="only Linux tells where the command line lies")
def test_the_key_is_asked_for_and_not_shown(run: Path) -> None:
    with serving(run, "--api-key=a-secret", LMLONG_API_KEY="another") as (process, address):
        shown = Path(f"/proc/{process.pid}/cmdline").read_bytes()
        assert b"--api-key=xxxxxxxx\0" in shown and b"a-secret" not in shown
        models = f"{address}/v1/models"
        assert httpx.get(models).status_code == 401
        assert httpx.get(models, headers={"Authorization": "Bearer a-secret"}).status_code == 200


@pytest.mark.skipif(not Path("/proc/self/limits").exists(), reason="only Linux tells the limits of others")
def test_it_may_have_as_many_connections_as_the_system_allows(run: Path) -> None:
    lower = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (200, 300))"
    with serving(run, python=("-c", f"{lower}; from lmlong.cli.main import main; main()")) as (process, _):
        assert re.search(r"Max open files +300 +300 ", Path(f"/proc/{process.pid}/limits").read_text())


@pytest.mark.skipif(sys.platform == "win32", reason="sockets are not files there")
def test_more_silent_connections_than_files_keep_nobody_out(run: Path) -> None:
    lower = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))"
    with serving(run, python=("-c", f"{lower}; from lmlong.cli.main import main; main()")) as (process, address):
        where = ("127.0.0.1", int(address.rpartition(":")[2]))
        silent = []
        try:
            for _ in range(6):
                silent += [socket.create_connection(where, timeout=60) for _ in range(60)]
                assert httpx.get(f"{address}/health", timeout=60).status_code == 200
            assert silent[0].recv(1) == b"", "the oldest was closed"
        finally:
            for connection in silent:
                connection.close()
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 143
        assert process.stderr is not None and process.stderr.read() == ""


def test_all_names_of_a_run_reach_the_same_sessions(run: Path, tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "tiny").symlink_to(run)
    ids = []
    for name in ("tiny", str(run)):
        with serving(name, cwd=tmp_path) as (_, address):
            assert httpx.get(f"{address}/v1/models").json()["data"][0]["id"] == "tiny"
            httpx.post(f"{address}/v1/sessions", json={"text": "a book"}).raise_for_status()
            ids.append({each["id"] for each in httpx.get(f"{address}/v1/sessions").json()["data"]})
    assert ids[0] < ids[1]
    assert (run.parent / "tiny-sessions").is_dir() and not list(tmp_path.rglob("*-sessions"))


def test_where_the_key_comes_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "key").write_text("of-a-file\n\nanother\n")
    monkeypatch.setenv("LMLONG_API_KEY", "of-the-environment")
    assert read_keys(None, None) == ["of-the-environment"]
    assert read_keys(None, tmp_path / "key") == ["of-a-file", "another"]
    monkeypatch.delenv("LMLONG_API_KEY")
    assert read_keys(None, None) == []


def test_a_mistake_is_one_message(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("LMLONG_API_KEY", raising=False)
    (tmp_path / "empty").write_text(" \n")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for options, told in [
            (["--port", port], rf"--port: {port} of 127.0.0.1 cannot be had \(Address already in use\)"),
            (["--host", "no.such.host.invalid"], r"--host: no.such.host.invalid is no address here"),
            (["--host", "203.0.113.7"], r"--port: 8000 of 203.0.113.7 cannot be had"),
            (["--api-key-file", str(tmp_path / "empty")], r"empty: a key consists of printable"),
            (["--api-key", "a b"], r"--api-key: a key consists of printable"),
            (["--api-key", "a", "--api-key-file", str(tmp_path / "empty")], r"mutually exclusive"),
        ]:
            monkeypatch.setattr(sys, "argv", ["lmlong", "serve", str(run), *options])
            with pytest.raises(SystemExit) as left:
                cli.main()
            assert left.value.code == 2
            message = capsys.readouterr().err
            assert re.search(told, message) and message.count("\n") == 1, message


def test_without_its_libraries_it_says_what_to_install(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, "lmlong.serving.server", raising=False)
    monkeypatch.setattr(sys, "argv", ["lmlong", "serve", str(run)])
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == 2 and "pip install -e '.[serve]'" in capsys.readouterr().err


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
def test_every_curl_line_of_the_pages_works(run: Path, tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("a book of a few words. " * 50)
    (tmp_path / "book.epub").write_bytes(epub())
    session = "none"
    pages = [ROOT / "docs" / "guides" / "serve.md", ROOT / "docs" / "tutorials" / "serve-a-model.md"]
    text = "\n".join(page.read_text() for page in pages)
    blocks = re.findall(r"^```sh\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines() if line.startswith("curl ")]
    assert len(lines) >= 4
    with serving(run) as (_, address):
        for line in lines:
            assert "http://localhost:8000/" in line
            command = line.replace("http://localhost:8000", address).replace("quickstart", run.name)
            command = command.replace('"ID"', f'"{session}"').replace("/ID/", f"/{session}/")
            found = subprocess.run(
                command, shell=True, capture_output=True, text=True, timeout=60, check=True, cwd=tmp_path
            )
            assert found.stdout and '"error"' not in found.stdout, found.stdout
            session = (re.findall(r'"id":"([0-9a-f]{24})"', found.stdout) or [session])[0]
