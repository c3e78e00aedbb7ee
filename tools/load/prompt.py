"""A prompt of megabytes is read while others stream: none of them may pause for it."""

import argparse
import asyncio
import json
import time
from itertools import pairwise
from typing import Any

from load.client import COMPLETIONS, Answer, Client, Exchange
from load.findings import Findings
from load.server import serving
from load.texts import library

ENDLESS = 1 << 20
"""Tokens, more than any stream comes to."""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--streams", type=int, default=16, help="that others read meanwhile")
    parser.add_argument("--bytes", type=int, default=5_000_000, help="of the long prompt")
    parser.add_argument("--before", type=float, default=10.0, help="seconds that they stream before it is sent")


def measure(options: argparse.Namespace, found: Findings) -> None:
    words = ["--max-tokens", str(ENDLESS), "--timeout", "36000"]
    words += ["--max-prompt", str(options.bytes), "--max-body", str(2 * options.bytes + 1000)]
    with serving(options.run, options.threads, *words) as server:
        streams = [Stream(Client(server.port), seed) for seed in range(options.streams)]
        sent, answer, own = asyncio.run(beside(streams, Client(server.port), options))
        server.check_log(found)
    received = answer.pieces[-1][0]
    found.must(answer.status == 200, f"the long prompt: {answer.status}, {answer.body[:300]!r}")
    usage = answer.json["usage"] if answer.status == 200 else {"prompt_tokens": 0}
    found.tell("tokens of the long prompt", usage["prompt_tokens"])
    found.tell("time until it is answered", received - sent, "s")
    found.tell("tokens read a second", usage["prompt_tokens"] / (received - sent), "tokens/s")
    calm, under = (pauses(streams, *span) for span in ((0.0, sent), (sent, received)))
    found.must(len(under) > options.streams, "the streams have not gone on beside it")
    found.tell("longest pause of a stream before", max(calm, default=0.0), "s")
    found.want("longest pause of a stream meanwhile", max(under, default=0.0), "s", most=0.3)
    found.tell("longest pause of the client itself", own, "s")
    found.tell("the ninth of ten, meanwhile", sorted(under)[len(under) * 9 // 10], "s")
    found.tell("events of the streams meanwhile", len(under))


class Stream:
    """A stream that is opened anew wherever its text ends."""

    def __init__(self, client: Client, seed: int):
        self.client, self.seed = client, seed
        self.exchanges: list[Exchange] = []

    async def go_on(self) -> None:
        while True:
            self.seed += 1000
            body: dict[str, Any] = {"prompt": "def ", "max_tokens": ENDLESS, "seed": self.seed, "stream": True}
            exchange = await self.client.connect()
            self.exchanges.append(exchange)
            exchange.transport.write(self.client.request("POST", COMPLETIONS, json.dumps(body).encode()))
            try:
                await exchange.ended
            finally:
                exchange.transport.abort()


async def beside(streams: list[Stream], client: Client, options: argparse.Namespace) -> tuple[float, Answer, float]:
    """Return when the long prompt was sent, its answer, beside streams that go on all the time, and how long the client
    had to wait for this machine meanwhile."""
    body = json.dumps({"prompt": library()[: options.bytes].encode()[: options.bytes].decode("utf-8", "ignore")})
    whole = body[:-1] + ', "max_tokens": 8}'
    lags: list[float] = []
    going = [asyncio.ensure_future(stream.go_on()) for stream in streams]
    try:
        await asyncio.sleep(options.before)
        going.append(asyncio.ensure_future(watch(lags)))
        sent = time.perf_counter()
        answer = await client.ask("POST", COMPLETIONS, whole.encode(), seconds=36000)
        return sent, answer, max(lags)
    finally:
        for task in going:
            task.cancel()
        await asyncio.gather(*going, return_exceptions=True)


async def watch(lags: list[float]) -> None:
    """Note how much later than it should each of many short sleeps ends."""
    while True:
        begun = time.perf_counter()
        await asyncio.sleep(0.01)
        lags.append(time.perf_counter() - begun - 0.01)


def pauses(streams: list[Stream], begin: float, end: float) -> list[float]:
    """Return the times between one event of a stream and its next, where that came between two moments."""
    found = []
    for exchange in (exchange for stream in streams for exchange in stream.exchanges):
        moments = [moment for moment, data in exchange.pieces if b"data: " in data]
        found += [after - before for before, after in pairwise(moments) if begin < after <= end]
    return found
