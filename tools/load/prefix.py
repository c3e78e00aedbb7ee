"""Prompts cut from each other: what is read once changes no text, and nobody finds out what another key has sent."""

import argparse
import asyncio
import random
import tempfile
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from load.client import COMPLETIONS, Client
from load.findings import Findings
from load.server import serving
from load.texts import cut, shared

CANARIES = 20
"""Texts of one key that another looks for."""

TIE = 1e-4
"""Two logits so near are in no order that rounding could not change."""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompts", type=int, default=1000)
    parser.add_argument("--longest", type=int, default=6000, help="characters of a prompt")
    parser.add_argument("--tokens", type=int, default=24, help="of each text")
    parser.add_argument("--clients", type=int, default=8, help="at a time")
    parser.add_argument("--memory", default="2048m", help="of the prefix cache")


class Text(NamedTuple):
    """A text, token by token."""

    tokens: list[str]
    gaps: list[float]
    """Between the two best logits in the place of each token."""
    prompt_tokens: int
    cached_tokens: int


def measure(options: argparse.Namespace, found: Findings) -> None:
    prompts = draw_prompts(options)
    told: dict[str, list[Text]] = {}
    for memory in (options.memory, "0"):
        with serving(options.run, options.threads, "--prefix-cache", memory) as server:
            told[memory] = asyncio.run(write_all(Client(server.port), prompts, options))
            server.check_log(found)
    cached, plain = told[options.memory], told["0"]
    parted = [(number, place) for number in range(len(prompts)) if (place := parts_at(cached[number], plain[number]))]
    for number, place in parted:
        gap = plain[number].gaps[place - 1]
        texts = ("".join(text[number].tokens) for text in (cached, plain))
        found.must(gap <= TIE, f"prompt {number} parts at token {place} by {gap:.2g}: {' != '.join(map(repr, texts))}")
    found.tell("texts", len(prompts))
    found.tell("texts that are the same", len(prompts) - len(parted))
    found.tell("texts that part where two logits tie", len(parted) - len(found.wrong))
    tell_tokens(prompts, cached, found)
    keep_secrets(options, found)


def tell_tokens(prompts: Sequence[str], cached: Sequence[Text], found: Findings) -> None:
    """Tell what was read, and what of that had been read before."""
    total, read = sum(text.prompt_tokens for text in cached), 0.0
    for number, (prompt, text) in enumerate(zip(prompts, cached, strict=True)):
        known = max((shared(prompt, before) for before in prompts[:number]), default=0)
        new = text.prompt_tokens * (len(prompt) - known) / max(1, len(prompt))
        read += max(0.0, text.prompt_tokens - text.cached_tokens - new)
    skipped = sum(text.cached_tokens for text in cached)
    found.must(skipped > 0, "the cache was of no use")
    found.tell("tokens of prompts", total)
    found.tell("tokens not read again", skipped)
    found.tell("tokens read though they had been read before, about", round(read))


def keep_secrets(options: argparse.Namespace, found: Findings) -> None:
    """See whether what one key has sent is of use to another, who could so find out that it was sent."""
    draw, keys = random.Random(options.seed), ("key-of-one", "key-of-another")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "keys"
        file.write_text("\n".join(keys))
        words = ["--prefix-cache", options.memory, "--api-key-file", str(file)]
        with serving(options.run, options.threads, *words, key=keys[0]) as server:
            one, another = (Client(server.port, key) for key in keys)
            canaries = [cut(draw, 100, 1000) for _ in range(CANARIES)]
            asyncio.run(look_for(canaries, one, another, found))
            server.check_log(found)
    found.tell("canaries that no other key found", len(canaries))


async def look_for(canaries: Sequence[str], one: Client, another: Client, found: Findings) -> None:
    for number, canary in enumerate(canaries):
        begun = [await cached_tokens(client, canary) for client in (one, one, another, another)]
        kept = begun[0] == begun[2] == 0 and begun[1] == begun[3] > 0
        found.must(kept, f"canary {number}: {begun} of its tokens are known to one key, twice, and to another")


async def cached_tokens(client: Client, prompt: str) -> int:
    answer = await client.post(COMPLETIONS, prompt=prompt, max_tokens=1)
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def draw_prompts(options: argparse.Namespace) -> list[str]:
    """Return prompts, each a beginning of one before, and often other text after that."""
    draw, prompts = random.Random(options.seed), [""]
    while len(prompts) <= options.prompts:
        before = draw.choice(prompts)
        kept = before[: draw.choice([len(before), draw.randint(0, len(before))])]
        more = cut(draw, 1, options.longest // 4) if draw.random() < 0.7 else ""
        prompts.append((kept + more)[: options.longest])
    return prompts[1:]


async def write_all(client: Client, prompts: Sequence[str], options: argparse.Namespace) -> list[Text]:
    """Return the text after each prompt, which a few clients ask for one after the other."""
    texts: dict[int, Text] = {}
    numbers = count()

    async def ask() -> None:
        while (number := next(numbers)) < len(prompts):
            body = {"prompt": prompts[number], "max_tokens": options.tokens, "temperature": 0, "logprobs": 2}
            texts[number] = text_of(await client.post(COMPLETIONS, **body))

    await asyncio.gather(*(ask() for _ in range(options.clients)))
    return [texts[number] for number in range(len(prompts))]


def text_of(answer: dict[str, Any]) -> Text:
    told, usage = answer["choices"][0]["logprobs"], answer["usage"]
    best = [sorted(likely.values(), reverse=True) for likely in told["top_logprobs"]]
    gaps = [values[0] - values[1] if len(values) > 1 else 0.0 for values in best]
    return Text(told["tokens"], gaps, usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"])


def parts_at(one: Text, other: Text) -> int:
    """Return the number of the first token, from 1 on, in which two texts differ; 0 where they are the same."""
    if one.tokens == other.tokens:
        return 0
    return shared(one.tokens, other.tokens) + 1
