"""Malformed requests, bytes that are not requests, and silent connections: each is refused, and the server keeps no
memory, file or thread of them."""

import argparse
import asyncio
import json
import random
import sys
from collections import Counter
from itertools import islice
from pathlib import Path

from load.client import COMPLETIONS, Client, NoAnswer
from load.findings import Findings
from load.server import Server, becomes_true, serving

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from serving.request_draws import VALID, connections, requests

MB = 1e6

PATIENCE = 20.0
"""Seconds within which each must be answered."""

MORE = 0.5
"""Seconds after which the client ends its side of a connection whose request may be incomplete."""

WARM_UP = 0.2
"""Share of the requests before memory is first measured."""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--raw", type=float, default=0.2, help="share that is arbitrary bytes")
    parser.add_argument("--silent", type=int, default=300, help="connections that send nothing; 0 for none")
    parser.add_argument("--clients", type=int, default=16, help="at a time")


def measure(options: argparse.Namespace, findings: Findings) -> None:
    words = ["--max-tokens", "8", "--rows", "8", "--memory", "0"]
    with serving(options.run, options.threads, *words) as server:
        hostile = Hostile(Client(server.port), options, findings)
        first = int(options.requests * WARM_UP)
        asyncio.run(hostile.send(first))
        asyncio.run(use_all(Client(server.port)))
        becomes_true(lambda: server.is_idle, PATIENCE)
        before, files = server.resident_at_rest(), (server.descriptors, server.threads)
        asyncio.run(hostile.send(options.requests - first))
        if options.silent:
            asyncio.run(keep_silent(Client(server.port), options.silent, findings))
        answer = asyncio.run(Client(server.port).post(COMPLETIONS, prompt="def ", max_tokens=2))
        findings.require(bool(answer["choices"]), "no text afterwards")
        examine(server, files, findings)
        findings.add("memory after the first fifth", before / MB, "MB")
        findings.add("grown since then", (server.resident_at_rest() - before) / MB, "MB")
    for name, number in sorted(hostile.outcomes.items()):
        findings.add(name, number)


async def use_all(client: Client) -> None:
    """Send a request of each kind, because some start a thread that stays."""
    for path, body in VALID.items():
        await client.ask("POST", path, json.dumps(body).encode())


async def keep_silent(client: Client, number: int, findings: Findings) -> None:
    """Open connections and send nothing: other requests are answered."""
    silent = [await client.connect() for _ in range(number)]
    answer = await client.ask("GET", "/health", seconds=PATIENCE)
    findings.require(answer.status == 200, f"beside {number} silent connections: {answer.status}")
    for exchange in silent:
        exchange.transport.abort()


def examine(server: Server, files: tuple[int, int], findings: Findings) -> None:
    """Require that a server is idle, with the files and threads of before."""
    findings.require(becomes_true(lambda: server.is_idle, PATIENCE), f"not idle afterwards: {server.metrics()}")
    same = becomes_true(lambda: (server.descriptors, server.threads) == files, PATIENCE)
    findings.require(same, f"open files and threads: {server.descriptors}, {server.threads}, before {files}")
    failed = server.metrics()["failed_texts"]
    findings.require(failed == 0, f"{failed:.0f} texts failed in the scheduler")
    server.check_log(findings)


class Hostile:
    """Clients that send malformed requests, and the answers by status."""

    def __init__(self, client: Client, options: argparse.Namespace, findings: Findings):
        self.outcomes = Counter[str]()
        self._client, self._findings, self._clients, self._raw = client, findings, options.clients, options.raw
        self._draw = random.Random(options.seed)
        self._requests = requests(random.Random(options.seed + 1))
        self._connections = connections(random.Random(options.seed + 2))

    async def send(self, number: int) -> None:
        """Send some more."""
        drawn = ["raw" if self._draw.random() < self._raw else "request" for _ in range(number)]
        bodies = list(islice(self._requests, drawn.count("request")))
        raw = list(islice(self._connections, drawn.count("raw")))

        async def go_on() -> None:
            while drawn:
                await (self._bytes(raw.pop()) if drawn.pop() == "raw" else self._request(*bodies.pop()))

        await asyncio.gather(*(go_on() for _ in range(self._clients)))

    async def _request(self, path: str, body: bytes) -> None:
        try:
            answer = await self._client.ask("POST", path, body, seconds=PATIENCE)
        except (NoAnswer, OSError) as error:
            self._findings.require(False, f"{path} {body[:200]!r}: {type(error).__name__} {error}")
            return
        self.outcomes[f"requests answered by {answer.status}"] += 1
        self._findings.require(answer.status < 500, f"{path} {body[:200]!r}: {answer.status} {answer.body[:200]!r}")

    async def _bytes(self, data: bytes) -> None:
        exchange = await self._client.connect()
        exchange.transport.write(data)
        if not await exchange.end(MORE) and exchange.transport.can_write_eof() and not exchange.transport.is_closing():
            exchange.transport.write_eof()
        ended = await exchange.end(PATIENCE)
        exchange.transport.abort()
        status = exchange.received[9:12].decode("latin-1") if exchange.received else "nothing"
        self.outcomes[f"bytes answered by {status}"] += 1
        self._findings.require(ended, f"{data[:200]!r}: the connection is still open after {PATIENCE:g} s")
        self._findings.require(not status.startswith("5"), f"{data[:200]!r}: {exchange.received[:200]!r}")
