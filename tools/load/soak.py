"""Clients mix all requests for minutes: no error, and memory that stays the same.

They generate, whole and as streams, some of which they leave; create sessions from text and files, append, fork,
continue, download, list and delete them. Resident memory after the first quarter is compared with that at the end.
"""

import argparse
import asyncio
import gzip
import json
import random
import statistics
import time
from collections import Counter

from load.client import COMPLETIONS, SESSIONS, Client, Refused
from load.findings import Findings
from load.server import Server, becomes_true, serving
from load.texts import cut

MB = 1e6
KINDS = {
    "text": 6,
    "stream": 6,
    "left stream": 3,
    "create": 2,
    "upload": 2,
    "append": 3,
    "fork": 5,
    "turn": 9,
    "download": 1,
    "list": 2,
    "score": 1,
    "delete": 3,
}
"""The requests of clients and their weights."""

MOST = 40
"""Sessions of one client; with more, it deletes one."""

EVERY = 5.0
"""Seconds between two looks at the memory."""

ROWS, MEMORY = "16", "96m"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--clients", type=int, default=6)


def measure(options: argparse.Namespace, findings: Findings) -> None:
    words = ["--rows", ROWS, "--memory", MEMORY, "--prefix-cache", MEMORY]
    with serving(options.run, options.threads, *words) as server:
        soak = Soak(server, options, findings)
        asyncio.run(soak.run())
        findings.require(becomes_true(lambda: server.is_idle, 30.0), f"not idle at the end: {server.metrics()}")
        metrics = server.metrics()
        findings.require(metrics["failed_texts"] == 0, f"{metrics['failed_texts']:.0f} texts failed")
        server.check_log(findings)
    for what, times in sorted(soak.counts.items()):
        findings.add(what, times)
    sizes = soak.resident
    quarter = len(sizes) // 4
    window = max(1, len(sizes) // 20)
    early, late = (statistics.median(part) / MB for part in (sizes[quarter : quarter + window], sizes[-window:]))
    findings.add("sessions at the end", metrics["sessions"])
    findings.add("bytes of their files", metrics["session_file_bytes"] / MB, "MB")
    findings.add("memory at the start", sizes[0] / MB, "MB")
    findings.add("memory after a quarter of the time", early, "MB")
    findings.add("memory at the end", late, "MB")
    findings.add("largest", max(sizes) / MB, "MB")
    findings.bound("grown since a quarter of the time", late - early, "MB", least=-1e9, most=0.1 * early)


class Soak:
    """The work of all clients."""

    def __init__(self, server: Server, options: argparse.Namespace, findings: Findings):
        self.counts = Counter[str]()
        self.resident: list[int] = []
        self._server, self._options, self._findings = server, options, findings
        self._end = time.monotonic() + 60 * options.minutes

    async def run(self) -> None:
        draw = random.Random(self._options.seed)
        clients = [self._work(random.Random(draw.random())) for _ in range(self._options.clients)]
        await asyncio.gather(self._watch(), *clients)

    async def _watch(self) -> None:
        while time.monotonic() < self._end:
            self.resident.append(self._server.resident)
            await asyncio.sleep(EVERY)

    async def _work(self, draw: random.Random) -> None:
        client, names = Client(self._server.port), list[str]()
        while time.monotonic() < self._end:
            kind = draw.choices([*KINDS], [*KINDS.values()])[0]
            kind = "delete" if len(names) >= MOST else kind
            if not names and kind in ("append", "fork", "turn", "download", "delete"):
                kind = "create"
            try:
                await self._ask(client, kind, draw, names)
            except Exception as error:
                self._findings.require(False, f"{kind}: {type(error).__name__}: {error}")
            self.counts[kind] += 1

    async def _ask(self, client: Client, kind: str, draw: random.Random, names: list[str]) -> None:
        """Send a request of a kind; `names` are the sessions of the client."""
        body = {"prompt": cut(draw, 1, 600), "max_tokens": draw.randint(1, 80), "learn": draw.random() < 0.1}
        name = draw.choice(names) if names else ""
        if kind == "text":
            await client.post(COMPLETIONS, **body, n=draw.randint(1, 3))
        elif kind == "stream":
            answer = await client.stream(**body)
            if answer.status != 200 or answer.lines[-1] != "[DONE]":
                raise Refused(f"{answer.status} {answer.body[-200:]!r}")
        elif kind == "left stream":
            await self._leave(client, {**body, "max_tokens": 2000, "stream": True}, draw)
        elif kind == "create":
            names.append((await client.post(SESSIONS, text=cut(draw, 1, 20_000)))["id"])
        elif kind == "upload":
            data, media_type = cut(draw, 100, 40_000).encode(), "application/octet-stream"
            if draw.random() < 0.5:
                data, media_type = gzip.compress(data), "application/gzip"
            answer = await client.ask("POST", f"{SESSIONS}?stream=true", data, media_type)
            session = json.loads(answer.lines[-2])
            names.append(session["id"])
        elif kind == "append":
            await client.post(f"{SESSIONS}/{name}/append", text=cut(draw, 1, 3000))
        elif kind == "fork":
            names.append((await client.post(f"{SESSIONS}/{name}/fork"))["id"])
        elif kind == "turn":
            fork = (await client.post(f"{SESSIONS}/{name}/fork"))["id"]
            names.append(fork)
            await client.post(COMPLETIONS, **{**body, "learn": None}, session=fork)
        elif kind == "download":
            answer = await client.ask("GET", f"{SESSIONS}/{name}/state")
            uploaded = await client.ask("POST", SESSIONS, answer.body, "application/vnd.lmlong.state")
            if uploaded.status == 201:
                names.append(uploaded.json["id"])
            elif uploaded.status != 413:  # a state that is larger than a body may be
                raise Refused(f"{uploaded.status} {uploaded.body[:200]!r}")
        elif kind == "list":
            await client.get(f"{SESSIONS}?limit=20")
        elif kind == "score":
            await client.post("/v1/score", text=cut(draw, 1, 3000))
        else:
            names.remove(name)
            answer = await client.ask("DELETE", f"{SESSIONS}/{name}")
            if answer.status != 200:
                raise Refused(f"{answer.status} {answer.body[:200]!r}")

    async def _leave(self, client: Client, body: dict, draw: random.Random) -> None:
        """Read a stream for a moment, and disconnect."""
        exchange = await client.connect()
        exchange.transport.write(client.request("POST", COMPLETIONS, json.dumps(body).encode()))
        await exchange.end(draw.uniform(0, 2))
        exchange.transport.abort()
