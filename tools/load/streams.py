"""Many streams at once: each must be complete."""

import argparse
import asyncio
import json
import time
from typing import Any

from load.client import Answer, Client
from load.findings import Findings
from load.server import serving

ALONE = 8
"""Streams that are requested again one by one: a text does not depend on those beside it."""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--streams", type=int, default=1000, help="at once")
    parser.add_argument("--rows", type=int, default=256, help="of the server")
    parser.add_argument("--tokens", type=int, default=200, help="of each stream")


def measure(options: argparse.Namespace, findings: Findings) -> None:
    words = ["--rows", str(options.rows), "--max-tokens", str(options.tokens)]
    bodies = [{"prompt": "def ", "max_tokens": options.tokens, "seed": seed} for seed in range(options.streams)]
    with serving(options.run, options.threads, *words, "--timeout", "3600") as server:
        begun = time.perf_counter()
        answers = asyncio.run(all_at_once(Client(server.port), bodies))
        seconds = time.perf_counter() - begun
        tokens = sum(check(number, answer, options.tokens, findings) for number, answer in enumerate(answers))
        asyncio.run(check_alone(Client(server.port), bodies, answers, findings))
        server.check_log(findings)
    findings.add("all streams together", tokens / seconds, "tokens/s")
    findings.add("time until all have ended", seconds, "s")
    findings.add("events", sum(len(answer.lines) for answer in answers))


async def all_at_once(client: Client, bodies: list[dict[str, Any]]) -> list[Answer]:
    return await asyncio.gather(*(client.stream(**body) for body in bodies))


def check(number: int, answer: Answer, most: int, findings: Findings) -> int:
    """Require that a stream is complete; return its number of tokens."""
    lines = answer.lines
    events = [json.loads(line) for line in lines[:-1]]
    reasons = [choice["finish_reason"] for event in events for choice in event.get("choices", ())]
    written = events[-1].get("usage", {}).get("completion_tokens", -1) if events else -1
    ended = [reason for reason in reasons if reason]
    right = answer.status == 200 and lines[-1:] == ["[DONE]"] and ended == reasons[-1:]
    right = right and (written == most if ended == ["length"] else ended == ["stop"] and 0 <= written < most)
    findings.require(right, f"stream {number}: {answer.status}, {ended}, {written} tokens, {lines[-2:]}")
    return max(0, written)


def text_of(answer: Answer) -> str:
    events = (json.loads(line) for line in answer.lines if line != "[DONE]")
    return "".join(choice["text"] for event in events for choice in event.get("choices", ()))


async def check_alone(client: Client, bodies: list[dict[str, Any]], answers: list[Answer], findings: Findings) -> None:
    """Request some of the texts again, one at a time."""
    for number in range(0, len(bodies), max(1, len(bodies) // ALONE)):
        alone = text_of(await client.stream(**bodies[number]))
        findings.require(alone == text_of(answers[number]), f"stream {number}: alone it is {alone!r}")
