"""Probes: texts that ask for something said before, at a known distance.

copy, induction and mqar are of symbols drawn from the run's own vocabulary, and something is asked for exactly so many
tokens after it was said. passkey and needle hide a sentence in the held-out text and ask after so many tokens of it.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from lmlong.data.tokenizers.base import Tokenizer
from lmlong.errors import UsageError

PAIRS = 8
"""Keys and their values in one text of mqar."""

NEEDLES = 4
"""Sentences in one text of needle, of which one is asked for."""

SHORTEST = 2 * PAIRS
"""Tokens that all pairs take."""


class ProbeText(NamedTuple):
    """The tokenizer, filler and words that probes are made of."""

    tokenizer: Tokenizer
    text: np.ndarray  # tokens of the held-out text, without bos and eos
    words: list[str]  # that occur in it


class Trial(NamedTuple):
    """One text, and the positions of the answers in it."""

    tokens: np.ndarray
    asked: np.ndarray


def copy(source: ProbeText, distance: int, random: np.random.Generator) -> Trial:
    """Return symbols said twice, asked for from the second on: the first one shows that they repeat."""
    said = random.choice(symbols(source.tokenizer), distance)
    return Trial(np.concatenate([said, said]), np.arange(distance + 1, 2 * distance))


def induction(source: ProbeText, distance: int, random: np.random.Generator) -> Trial:
    """Return a text in which one symbol comes a second time; asked for is what followed it before."""
    first, *others = random.permutation(symbols(source.tokenizer))
    filler = random.choice(others, distance - 1)
    return Trial(np.concatenate([[first], filler, [first], filler[:1]]), np.array([distance + 1]))


def mqar(source: ProbeText, distance: int, random: np.random.Generator) -> Trial:
    """Return keys with their values, other symbols, and the keys again; asked for are their values."""
    drawn = random.permutation(symbols(source.tokenizer))
    keys, others = drawn[:PAIRS], drawn[PAIRS:]
    pairs = np.stack([keys, random.choice(others, PAIRS)], axis=1).flatten()
    filler = random.choice(others, distance - 2 * PAIRS)
    return Trial(np.concatenate([pairs, filler, pairs]), distance + 1 + 2 * np.arange(PAIRS))


def passkey(source: ProbeText, distance: int, random: np.random.Generator) -> Trial:
    """Return a sentence with a number, other text, and the sentence again; asked for is the number."""
    answer = f" {random.integers(10_000, 100_000)}"
    return _asked_after(source, ["The pass key is"], [answer], ". Remember it.\n", 0, distance, random)


def needle(source: ProbeText, distance: int, random: np.random.Generator) -> Trial:
    """Return sentences that give names a word each, other text, and one sentence again; asked for is its word."""
    if len(source.words) < 2 * NEEDLES:
        raise UsageError("--probe: needle takes words, and the text has too few. Name another text with --data.")
    chosen = random.choice(source.words, 2 * NEEDLES, replace=False)
    told = [f"The secret word of {name} is" for name in chosen[:NEEDLES]]
    answers = [f" {word}" for word in chosen[NEEDLES:]]
    return _asked_after(source, told, answers, ".\n", int(random.integers(NEEDLES)), distance, random)


Probe = Callable[[ProbeText, int, np.random.Generator], Trial]
PROBES: dict[str, Probe] = {
    "copy": copy,
    "induction": induction,
    "mqar": mqar,
    "passkey": passkey,
    "needle": needle,
}


def symbols(tokenizer: Tokenizer) -> np.ndarray:
    """Return the tokens that stand for text."""
    found = np.flatnonzero(tokenizer.token_bytes)
    if len(found) < 4 * PAIRS:
        raise UsageError(f"--probe: the vocabulary has {len(found)} tokens of text, probes take {4 * PAIRS} or more.")
    return found


def _asked_after(
    source: ProbeText,
    told: list[str],
    answers: list[str],
    end: str,
    chosen: int,
    distance: int,
    random: np.random.Generator,
) -> Trial:
    """Return sentences with their answers, `distance` tokens of other text, and one of the sentences again."""
    encode = source.tokenizer.encode
    sentences = [encode(words) + encode(answer) for words, answer in zip(told, answers, strict=True)]
    begin = int(random.integers(len(source.text)))
    filler = source.text.take(np.arange(begin, begin + distance), mode="wrap")
    tokens = [
        np.concatenate([np.array(sentence + encode(end)) for sentence in sentences]),
        filler.astype(np.int64),
        np.array(encode("\n") + sentences[chosen]),
    ]
    together = np.concatenate(tokens)
    answer = len(encode(answers[chosen]))
    return Trial(together, np.arange(len(together) - answer, len(together)))
