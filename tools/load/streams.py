"""Many streams at once: each must be complete; speed is compared with one batch of `lmlong generate`."""

import argparse
import asyncio
import json
import os
import random
import re
import subprocess
import sys
import time
from typing import Any

from load.client import Answer, Client
from load.findings import Findings
from load.server import Server, serving
from load.texts import cut

SAMPLES = 64
"""Texts of `lmlong generate` whose speed the server's is compared with."""

ALONE = 8
"""Streams that are requested again one by one: a text does not depend on those beside it."""

MB = 1e6


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--streams", type=int, default=1000, help="at once")
    parser.add_argument("--rows", type=int, default=256, help="of the server")
    parser.add_argument("--tokens", type=int, default=200, help="of each stream")
    parser.add_argument("--prompt", type=int, default=0, metavar="CHARS", help="longest prompt; 0 for 'def '")


def measure(options: argparse.Namespace, findings: Findings) -> None:
    generated = [generate(options)]
    words = ["--rows", str(options.rows), "--waiting", str(options.streams), "--max-tokens", str(options.tokens)]
    with serving(options.run, options.threads, *words, "--timeout", "3600") as server:
        idle = server.resident
        server.forget_peak()
        bodies = draw_bodies(options)
        before, begun, server_before = os.times(), time.perf_counter(), server.cpu_seconds
        answers = asyncio.run(all_at_once(Client(server.port), bodies))
        seconds, after, server_after = time.perf_counter() - begun, os.times(), server.cpu_seconds
        add_memory(server, idle, findings)
        tokens = sum(check(number, answer, options.tokens, findings) for number, answer in enumerate(answers))
        asyncio.run(check_alone(Client(server.port), bodies, answers, findings))
        server.check_log(findings)
    generated.append(generate(options))
    mean = len(generated) / sum(1 / speed for speed in generated)
    for name, speed in zip(("before", "after"), generated, strict=True):
        findings.add(f"lmlong generate --samples {SAMPLES}, {name}", speed, "tokens/s")
    findings.add("all streams together", tokens / seconds, "tokens/s")
    findings.bound("of lmlong generate", tokens / seconds / mean, least=0.6)
    findings.add("time until all have ended", seconds, "s")
    findings.add("processor time of the client", after.user + after.system - before.user - before.system, "s")
    findings.add("processor time of the server", server_after - server_before, "s")
    firsts = sorted(answer.moments[0] - answer.begun for answer in answers if answer.moments)
    findings.add("first event of a stream, median", firsts[len(firsts) // 2], "s")
    findings.add("events", sum(len(answer.lines) for answer in answers))


def draw_bodies(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the body of each request."""
    draw = random.Random(options.seed)
    prompts = [cut(draw, 0, options.prompt) if options.prompt else "def " for _ in range(options.streams)]
    return [{"prompt": text, "max_tokens": options.tokens, "seed": seed} for seed, text in enumerate(prompts)]


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


def add_memory(server: Server, idle: int, findings: Findings) -> None:
    metrics, peak = server.metrics(), server.peak
    states = metrics["rows"] * metrics["row_state_bytes"]
    findings.add("memory, idle", idle / MB, "MB")
    findings.add("memory, at its peak", peak / MB, "MB")
    findings.add("states of all rows", states / MB, "MB")
    findings.add("prefix cache", metrics["prefix_cache_bytes"] / MB, "MB")
    findings.bound("peak beyond idle and states", (peak - idle - states) / MB, "MB", least=-1e9, most=440)
    findings.add("memory, at rest", server.resident_at_rest() / MB, "MB")


def generate(options: argparse.Namespace) -> float:
    """Return the tokens per second of `lmlong generate`, which decodes its texts as one batch."""
    words = ["--prompt", "def ", "--samples", str(SAMPLES), "--max-tokens", str(options.tokens), "--stats"]
    command = [sys.executable, "-m", "lmlong", "generate", options.run, *words, "--threads", str(options.threads)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(options.threads)}
    report = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stderr
    match = re.search(r"written ([\d,]+) tokens in ([\d.]+) s", report)
    assert match, report
    return int(match[1].replace(",", "")) / float(match[2])
