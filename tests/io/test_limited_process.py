"""A limited process answers, is replaced when it dies, and never outlives its owner."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lmlong.io.limited_process import LimitedProcess, RequestFailed

PROGRAM = """
import os, time
from lmlong.io.limited_process import answer_requests

class Refused(Exception):
    pass

def answer(request):
    if "sleep" in request:
        open(request["file"], "w").write(str(os.getpid()))
        time.sleep(request["sleep"])
    if "exit" in request:
        os._exit(3)
    if "refuse" in request:
        raise Refused(request["refuse"])
    if "memory" in request:
        bytearray(request["memory"])
    return request["data"] or b"x" * request["size"]

answer_requests(answer, 1 << 30, (Refused,))
"""


@pytest.fixture
def process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LimitedProcess]:
    (tmp_path / "a_program.py").write_text(PROGRAM)
    monkeypatch.syspath_prepend(str(tmp_path))
    process = LimitedProcess("a_program")
    yield process
    process.close()


def test_process_answers_or_reports_why_not(process: LimitedProcess, tmp_path: Path) -> None:
    about: dict[str, Any]
    for about, reason in [
        ({"refuse": "not this"}, "^not this$"),
        ({"size": "no number"}, "^TypeError: "),
        ({"memory": 2 << 30}, "^it takes more than 1 GB$"),
        ({"exit": 1}, "^the program that reads it ended$"),
        ({"sleep": 60, "file": str(tmp_path / "pid")}, "^it took more than 1 seconds$"),
    ]:
        assert process.ask({"size": 1 << 20}, 60) == b"x" * (1 << 20)
        with pytest.raises(RequestFailed, match=reason):
            process.ask(about, 1 if "sleep" in about else 60)
    assert process.ask({}, 60, b"\n{}\n" * 99_999) == b"\n{}\n" * 99_999
    assert process.ask({"size": 3}, 60) == b"xxx"


def wait_for(file: Path, ended: threading.Event) -> int:
    while not file.exists() or not file.read_text():
        assert not ended.wait(0.01)
    return int(file.read_text())


def test_closing_a_process_ends_its_request(process: LimitedProcess, tmp_path: Path) -> None:
    ended, reasons = threading.Event(), []

    def ask() -> None:
        try:
            process.ask({"sleep": 600, "file": str(tmp_path / "pid")}, 600)
        except RequestFailed as error:
            reasons.append(str(error))
        ended.set()

    threading.Thread(target=ask).start()
    wait_for(tmp_path / "pid", ended)
    process.close()
    assert ended.wait(60) and reasons == ["the program that reads it ended"]


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="only Linux reports processes there")
def test_process_ends_when_its_owner_is_killed(process: LimitedProcess, tmp_path: Path) -> None:
    words = "import sys; from lmlong.io.limited_process import LimitedProcess as P; sys.path.insert(0, sys.argv[1])"
    words += "; P('a_program').ask({'sleep': 600, 'file': sys.argv[2]}, 1.5)"
    with subprocess.Popen([sys.executable, "-c", words, str(tmp_path), str(tmp_path / "pid")]) as owner:
        child = wait_for(tmp_path / "pid", threading.Event())
        owner.kill()
    for _ in range(3000):
        try:
            alive = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        except FileNotFoundError:
            return
        if not alive:
            return
        threading.Event().wait(0.01)
    pytest.fail("it is still there")
