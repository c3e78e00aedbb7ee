"""Thousands of sessions that sleep on disk: what they take there, and how soon one that is woken goes on."""

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from itertools import count
from pathlib import Path
from typing import Any

from load.client import COMPLETIONS, SESSIONS, Client
from load.findings import Findings
from load.server import serving
from load.texts import cut

MB = 1e6


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sessions", type=int, default=10_000)
    parser.add_argument("--memory", default="16m", help="of the server, for sessions that are awake")
    parser.add_argument("--longest", type=int, default=300, help="characters of the text of a session")
    parser.add_argument("--wake", type=int, default=300, help="sessions that are woken")
    parser.add_argument("--clients", type=int, default=16, help="at a time, while sessions are made")


def measure(options: argparse.Namespace, found: Findings) -> None:
    words = ["--memory", options.memory, "--max-sessions", str(options.sessions), "--max-session-bytes", "1048576m"]
    with tempfile.TemporaryDirectory(prefix="load-serve-sessions-") as name:
        folder = Path(name)
        with serving(options.run, options.threads, *words, folder=folder) as server:
            begun, idle = time.perf_counter(), server.resident
            made = asyncio.run(make_all(Client(server.port), options))
            found.tell("time to make a session", 1000 * (time.perf_counter() - begun) / options.sessions, "ms")
            found.tell("memory, idle", idle / MB, "MB")
            found.tell("memory with all sessions made", server.resident_at_rest() / MB, "MB")
            tell_disk(folder, options.sessions * server.metrics()["row_state_bytes"], found)
            server.check_log(found)
        begun = time.perf_counter()
        with serving(options.run, options.threads, *words, folder=folder) as server:
            found.tell("time until a server has started that finds them", time.perf_counter() - begun, "s")
            known = {session["id"]: session for session in asyncio.run(Client(server.port).get(SESSIONS))["data"]}
            lost = sum(known.get(session["id"]) != session for session in made)
            found.must(not lost, f"{lost} sessions are lost, or others than before")
            asyncio.run(wake(Client(server.port), [session["id"] for session in made], options, found))
            found.tell("memory after some were woken", server.resident_at_rest() / MB, "MB")
            server.check_log(found)


async def make_all(client: Client, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return sessions, each of a text of its own."""
    draw, numbers, made = random.Random(options.seed), count(), list[dict[str, Any]]()

    async def make() -> None:
        while next(numbers) < options.sessions:
            made.append(await client.post(SESSIONS, text=cut(draw, 1, options.longest)))

    await asyncio.gather(*(make() for _ in range(options.clients)))
    return made


def tell_disk(folder: Path, states: float, found: Findings) -> None:
    files = [path.stat() for path in folder.glob("*.state")]
    blocks = sum(512 * file.st_blocks for file in files)
    found.tell("files of sessions", len(files))
    found.tell("bytes of their states, each as a row has it", states / MB, "MB")
    found.tell("bytes of the files", sum(file.st_size for file in files) / MB, "MB")
    found.want("bytes on disk for one of a state", blocks / states, most=1.25)


async def wake(client: Client, names: list[str], options: argparse.Namespace, found: Findings) -> None:
    """Go on with some sessions, one at a time, that sleep, and then again while each is awake."""
    draw = random.Random(options.seed)
    chosen = draw.sample(names, min(options.wake, len(names)))
    await first_token(client, names[0])  # which no figure is about
    woken, again = [], []
    for name in chosen:
        woken.append(await first_token(client, name))
        again.append(await first_token(client, name))
    found.want("first token of a session that slept, median", statistics.median(woken), "ms", most=10)
    found.tell("the slowest", max(woken), "ms")
    found.tell("first token of a session that is awake, median", statistics.median(again), "ms")
    new = [await first_token(client, None) for _ in chosen]
    found.tell("first token of a new text, median", statistics.median(new), "ms")


async def first_token(client: Client, name: str | None) -> float:
    """Return the milliseconds from a request to its first token, by a session or after a short prompt."""
    start = {"session": name} if name else {"prompt": "def "}
    body = {**start, "max_tokens": 2, "stream": True, "temperature": 0}
    answer = await client.ask("POST", COMPLETIONS, json.dumps(body).encode())
    assert answer.status == 200 and answer.lines[-1] == "[DONE]", answer.body
    return 1000 * (answer.moments[0] - answer.begun)
