#!/usr/bin/env python
"""What it costs to cut a text into a prompt and what follows, in bits over the next 40 characters.

    python tools/healing_cost.py RUN BOOK... --places 300 --seed 0

Prompts are drawn from the books, cut after a space, anywhere, and before a space. What follows is held against the
tokens of prompt and continuation as one text, both as -log2 p of the characters after the cut, given the text of the
prompt: with its tokens as they are (--no-heal), and healed, by the probabilities of the draws that generation makes.
"whole" counts the first of the joint tokens whole, with what it has of the prompt. Errors are standard errors over
places.
"""

import argparse
import math
import random
import statistics
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lmlong.inference.healing import Start, starts
from lmlong.inference.loading import TrainedLanguageModel, load
from lmlong.inference.session import Session, append_token, next_logits

CONTEXT, NEXT = 600, 40
"""Characters of a prompt, and after it."""


class Costs(NamedTuple):
    """The extra bits of what follows one prompt."""

    no_heal: float
    healed: float
    no_heal_whole: float
    healed_whole: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run")
    parser.add_argument("books", nargs="+", type=Path)
    parser.add_argument("--places", type=int, default=300, help="prompts for each kind of cut")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    loaded = load(options.run, "cpu")
    if loaded.fast_step_at_once:
        loaded.use_fast_step()
    books = [book.read_text(encoding="utf-8") for book in options.books]
    print(f"{'cut':<14}" + "".join(f"{name.replace('_', ' '):>18}" for name in Costs._fields))
    for kind, seed in (("after a space", 0), ("anywhere", 1), ("before a space", 2)):
        draw = random.Random(f"{options.seed} {seed}")
        found = [costs(loaded, *place) for place in draw_places(draw, books, kind, options.places)]
        told = (mean_and_error(values) for values in zip(*found, strict=True))
        print(f"{kind:<14}" + "".join(f"{f'{mean:.2f} ± {error:.2f}':>18}" for mean, error in told), flush=True)


def draw_places(draw: random.Random, books: list[str], kind: str, count: int) -> Iterator[tuple[str, str]]:
    """Draw prompts and what follows them."""
    while count:
        book = draw.choice(books)
        cut = draw.randrange(CONTEXT, len(book) - NEXT)
        if {"after a space": book[cut - 1] == " ", "anywhere": True, "before a space": book[cut] == " "}[kind]:
            yield book[cut - CONTEXT : cut], book[cut : cut + NEXT]
            count -= 1


@torch.inference_mode()
def costs(loaded: TrainedLanguageModel, prompt: str, following: str) -> Costs:
    """Return the extra bits of `following` after a prompt."""
    session, tokenizer = loaded.read(prompt), loaded.tokenizer
    joint = tokenizer.encode(prompt + following)[int(session.total) - 1 :]  # of those that are read, one is bos
    found = starts(loaded.model, tokenizer, session, session.unread.row(0))
    weights = torch.tensor([start.log_weight for start in found], dtype=torch.float64)
    whole = -log_prob(loaded, session, joint)
    as_one = whole + float(weights.logsumexp(0))
    apart = -log_prob(loaded, loaded.read(prompt, heal=False), tokenizer.encode(following))
    healed = -next(way for way in map(partial(healed_log_prob, loaded, joint), found, weights.log_softmax(0)) if way)
    return Costs(*(value / math.log(2) for value in (apart - as_one, healed - as_one, apart - whole, healed - whole)))


def healed_log_prob(loaded: TrainedLanguageModel, joint: list[int], start: Start, share: Tensor) -> float | None:
    """Return the log-probability that joint tokens are drawn from this start, or None where they are not its own."""
    tokens, head = start.cover
    rest = joint[len(tokens) :]
    allowed = loaded.tokenizer.boundaries.tokens_beginning_with(head) if head else None
    if joint[: len(tokens)] != tokens or (allowed is not None and rest[0] not in allowed):
        return None
    return float(share) + log_prob(loaded, start.session, rest, allowed)


def log_prob(
    loaded: TrainedLanguageModel, session: Session, tokens: Sequence[int], allowed: np.ndarray | None = None
) -> float:
    """Return the log-probability of tokens after a session, the first of which is drawn from the allowed ones."""
    total = 0.0
    for token in tokens:
        logits, state = next_logits(loaded.model, session)
        logits = logits[0].double()
        total += float(logits[token] - (logits if allowed is None else logits[allowed]).logsumexp(-1))
        session, allowed = append_token(session, state, session.last.new_tensor([token])), None
    return total


def mean_and_error(values: Iterable[float]) -> tuple[float, float]:
    found = list(values)
    return statistics.fmean(found), statistics.stdev(found) / math.sqrt(len(found))


if __name__ == "__main__":
    main()
