"""Clients disconnect at random moments: rows, connections, threads and memory must be released."""

import argparse
import asyncio
import json
import random

from load.client import COMPLETIONS, Client, draw_text
from load.findings import Findings
from load.server import becomes_true, serving

MB = 1e6

WAYS = ("in the request", "in the prompt", "in the text", "while waiting")
"""When a client disconnects."""
LONGEST_PROMPT = 200_000

FREE_WITHIN = 20.0
"""Seconds."""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--clients", type=int, default=100, help="at once")
    parser.add_argument("--rounds", type=int, default=3, help="of these clients; the first warms the server up")
    parser.add_argument("--longest", type=float, default=3.0, help="seconds that a client stays")


def measure(options: argparse.Namespace, findings: Findings) -> None:
    draw = random.Random(options.seed)
    with serving(options.run, options.threads, "--rows", "32", "--max-tokens", "100k", "--memory", "0") as server:
        resident = []
        for number in range(options.rounds):
            if number == 1:
                before = server.descriptors, server.threads
            asyncio.run(all_leave(Client(server.port), draw, options))
            free = becomes_true(lambda: server.is_idle, FREE_WITHIN)
            findings.require(free, f"round {number}: {server.metrics()} after {FREE_WITHIN:g} s")
            resident.append(server.resident_at_rest())
        metrics = server.metrics()
        same = becomes_true(lambda: (server.descriptors, server.threads) == before, FREE_WITHIN)
        findings.require(same, f"open files and threads: {server.descriptors}, {server.threads}; before {before}")
        findings.require(metrics["failed_texts"] == 0, f"{metrics['failed_texts']:.0f} texts failed")
        server.check_log(findings)
        answer = asyncio.run(Client(server.port).post(COMPLETIONS, prompt="def ", max_tokens=2))
        findings.require(bool(answer["choices"]), "no text afterwards")
    findings.add("clients that disconnected", options.rounds * options.clients)
    findings.add("texts requested", metrics["texts"])
    findings.add("texts cancelled", metrics["cancelled_texts"])
    for number, size in enumerate(resident):
        findings.add(f"memory after round {number + 1}", size / MB, "MB")
    findings.add("grown since the first round", (resident[-1] - resident[0]) / MB, "MB")


async def all_leave(client: Client, draw: random.Random, options: argparse.Namespace) -> None:
    leaving = [
        leave(client, random.Random(draw.random()), WAYS[number % len(WAYS)], options.longest)
        for number in range(options.clients)
    ]
    await asyncio.gather(*leaving)


async def leave(client: Client, draw: random.Random, way: str, longest: float) -> None:
    """Send a request and disconnect."""
    reads = way == "in the prompt"
    prompt = draw_text(draw, LONGEST_PROMPT // 2, LONGEST_PROMPT) if reads else draw_text(draw, 1, 100)
    body = {"prompt": prompt, "max_tokens": 100_000, "n": draw.randint(1, 3), "stream": draw.random() < 0.7}
    request = client.request("POST", COMPLETIONS, json.dumps(body).encode())
    if way == "in the request":
        request = request[: draw.randrange(len(request))]
    exchange = await client.connect()
    exchange.transport.write(request)
    if way == "in the text" and body["stream"]:
        for _ in range(draw.randint(1, 200)):
            await asyncio.sleep(longest / 200)
            if len(exchange.pieces) > 2:
                break
    await exchange.end(draw.uniform(0, longest))
    if draw.random() < 0.5:
        exchange.transport.abort()  # sends RST if bytes are unread
    else:
        exchange.transport.close()
        await exchange.end(1.0)
