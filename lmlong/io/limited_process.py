"""Process hostile input in a child process with limited time and memory.

The child runs a module of lmlong that calls `answer_requests`. A request is a line of JSON followed by its data. The
answer is a line of JSON with an error, or with the size of the result that follows.
"""

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

MAX_REASON = 500
"""Characters of an error message, which may come from hostile input."""

START = "import runpy, sys; sys.path[:] = sys.argv[2:]; runpy.run_module(sys.argv[1], run_name='__main__')"
"""Code of the child: run a module, with the parent's `sys.path`."""


class RequestFailed(Exception):
    """The process returned no result. The message is the reason."""


class LimitedProcess:
    """A child process that answers one request at a time. It starts at the first request, and again after a request
    that killed it. It ends with `close`, or when its parent ends, which closes its standard input."""

    def __init__(self, module: str):
        self._module = module
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def ask(self, request: dict[str, Any], seconds: float, data: bytes = b"") -> bytes:
        """Return the result of a request, which may take up to `seconds`. The child reads `data` from the request."""
        with self._lock:
            return self._ask({**request, "seconds": seconds, "data": len(data)}, seconds, data)

    def close(self) -> None:
        """Kill the process, and so end a request that another thread waits for."""
        if process := self._process:
            process.kill()
        with self._lock:
            self._reap()

    def _ask(self, request: dict[str, Any], seconds: float, data: bytes) -> bytes:
        process, late = self._running(), threading.Event()
        assert process.stdin and process.stdout

        def end() -> None:
            late.set()
            process.kill()

        timer = threading.Timer(seconds, end)
        timer.daemon = True
        timer.start()
        try:
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.write(data)
            process.stdin.flush()
            answer = json.loads(process.stdout.readline() or b"null")
            result = process.stdout.read(answer.get("bytes", 0)) if answer else b""
        except BrokenPipeError:
            answer, result = None, b""
        finally:
            timer.cancel()
        if answer is None or len(result) < answer.get("bytes", 0):
            self._reap()
            raise RequestFailed(
                f"it took more than {seconds:.0f} seconds" if late.is_set() else "the program that reads it ended"
            )
        if "error" in answer:
            raise RequestFailed(answer["error"])
        return result

    def _running(self) -> "subprocess.Popen[bytes]":
        if self._process is None or self._process.poll() is not None:
            self._reap()
            self._process = subprocess.Popen(
                [sys.executable, "-c", START, self._module, *sys.path],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        return self._process

    def _reap(self) -> None:
        if self._process:
            self._process.kill()
            self._process.communicate()
            self._process = None


def answer_requests(
    answer: Callable[[dict[str, Any]], bytes], memory: int, expected: tuple[type[Exception], ...] = ()
) -> None:
    """Answer requests from standard input until it ends, in `memory` bytes. For errors of `expected` types only the
    message is reported, without the type."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal is for the parent
    _limit_memory(memory)
    for line in sys.stdin.buffer:
        request = json.loads(line)
        request["data"] = sys.stdin.buffer.read(request["data"])  # an error here ends the process
        data = b""
        try:
            with _alarm(request.pop("seconds")):
                data = answer(request)
            reply: dict[str, Any] = {"bytes": len(data)}
        except expected as error:
            reply = {"error": str(error)[:MAX_REASON]}
        except MemoryError:
            reply = {"error": f"it takes more than {memory >> 30} GB"}
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {error}"[:MAX_REASON]}
        sys.stdout.buffer.write(json.dumps(reply).encode() + b"\n" + data)
        sys.stdout.buffer.flush()


def _limit_memory(size: int) -> None:
    with suppress(ImportError, ValueError, OSError):  # not every system has this limit
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (size, size))


@contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    """End this process if the block takes longer, in case its parent, which enforces the limit, was killed."""
    if not hasattr(signal, "setitimer"):  # on Windows
        yield
        return
    signal.setitimer(signal.ITIMER_REAL, seconds + 1)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
