"""`lmlong serve` in a separate process, and its memory, files and threads by /proc."""

import http.client
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from load.findings import Findings

STARTS_WITHIN = 120.0
"""Seconds."""

REST = 2.5
"""Seconds."""

READY = "rows, decodes by"
"""A part of the line that a server logs when it is ready."""


class Server:
    """A process of `lmlong serve`."""

    def __init__(self, run: str, threads: int, *options: str, log: Path):
        words = [sys.executable, "-m", "lmlong", "serve", run, "--port", "0", "--threads", str(threads), *options]
        self._log = log
        with log.open("wb") as file:
            environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
            self.process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=file, env=environment)
        self._wait_until_it_serves()
        first = next(line for line in self._lines if READY in line)
        self.port = int(first.rpartition(":")[2])

    def check_log(self, findings: Findings) -> None:
        """Require that the log holds only the lines of the start."""
        lines = [line for line in self._lines if READY not in line and not line.startswith("WARNING: ")]
        findings.require(not lines, f"the server logged {len(lines)} lines:\n" + "\n".join(lines[-25:]))

    @property
    def _lines(self) -> list[str]:
        return self._log.read_text(errors="replace").splitlines()

    def _wait_until_it_serves(self) -> None:
        end = time.monotonic() + STARTS_WITHIN
        while not any(READY in line for line in self._lines):
            if self.process.poll() is not None or time.monotonic() > end:
                self.process.kill()
                raise RuntimeError("lmlong serve has not started:\n" + "\n".join(self._lines[-20:]))
            time.sleep(0.02)

    def metrics(self) -> dict[str, float]:
        """Return the metrics for Prometheus, without the counters of each path."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request("GET", "/metrics")
            lines = connection.getresponse().read().decode().splitlines()
        finally:
            connection.close()
        pairs = (line.split() for line in lines if line.startswith("lmlong_") and "{" not in line)
        return {name.removeprefix("lmlong_").removesuffix("_total"): float(value) for name, value in pairs}

    @property
    def threads(self) -> int:
        return int(self._status("Threads"))

    @property
    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def _status(self, name: str) -> str:
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return next(line for line in lines if line.startswith(f"{name}:")).split()[1]

    def resident_at_rest(self) -> int:
        """Return the bytes of resident memory after the server had time to release what it does not need."""
        time.sleep(REST)
        return 1024 * int(self._status("VmRSS"))

    @property
    def is_idle(self) -> bool:
        metrics = self.metrics()
        return metrics["active_rows"] == metrics["queued_texts"] == 0

    def kill(self) -> None:
        """End it as a power cut would."""
        self.process.kill()
        self.process.wait()


@contextmanager
def serving(run: str, threads: int, *options: str) -> Iterator[Server]:
    """Start a server with an empty folder of sessions; end it after the block."""
    with tempfile.TemporaryDirectory(prefix="load-serve-") as folder:
        words = ["--sessions", f"{folder}/sessions", *options]
        server = Server(run, threads, *words, log=Path(folder) / "log")
        try:
            yield server
        finally:
            server.kill()


def becomes_true(condition: Callable[[], bool], seconds: float) -> bool:
    """Return whether a condition became true within some seconds."""
    end = time.monotonic() + seconds
    while not (held := condition()) and time.monotonic() < end:
        time.sleep(0.05)
    return held
