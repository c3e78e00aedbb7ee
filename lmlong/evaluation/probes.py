"""Probes: texts that repeat something at a known distance.

copy, induction and mqar are made of symbols drawn from the run's own vocabulary, and the answer is exactly `distance`
tokens before. passkey and needle put a sentence before `distance` tokens of held-out text and then repeat it.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from lmlong.data.tokenizers.base import Tokenizer
from lmlong.errors import UsageError

PAIRS = 8
"""Number of key-value pairs in a text of mqar."""

NEEDLES = 4
"""Number of sentences in a text of needle, of which one is repeated."""

SHORTEST = 2 * PAIRS
"""Number of tokens of all pairs."""


class ProbeText(NamedTuple):
    """The tokenizer, filler and words that probes are made from."""

    tokenizer: Tokenizer
    text: np.ndarray  # tokens of the held-out text, without bos and eos
    words: list[str]  # that occur in it


class Trial(NamedTuple):
    """One text, and the positions of the answers in it."""

    tokens: np.ndarray
    asked: np.ndarray


def copy(source: ProbeText, distance: int, random: np.random.Generator) -> Trial:
    """Return a sequence of symbols twice; the answers are its second copy without the first symbol."""
    sequence = random.choice(symbols(source.tokenizer), distance)
    return Trial(np.concatenate([sequence, sequence]), np.arange(distance + 1, 2 * distance))


def induction(source: ProbeText, distance: int, random: np.random.Generator) -> Trial:
    """Return a text in which one symbol is repeated; the answer is the symbol that followed it the first time."""
    first, *rest = random.permutation(symbols(source.tokenizer))
    filler = random.choice(rest, distance - 1)
    return Trial(np.concatenate([[first], filler, [first], filler[:1]]), np.array([distance + 1]))


def mqar(source: ProbeText, distance: int, random: np.random.Generator) -> Trial:
    """Return keys with their values, other symbols, and the keys again; the answers are their values."""
    drawn = random.permutation(symbols(source.tokenizer))
    keys, rest = drawn[:PAIRS], drawn[PAIRS:]
    pairs = np.stack([keys, random.choice(rest, PAIRS)], axis=1).flatten()
    filler = random.choice(rest, distance - 2 * PAIRS)
    return Trial(np.concatenate([pairs, filler, pairs]), distance + 1 + 2 * np.arange(PAIRS))


def passkey(source: ProbeText, distance: int, random: np.random.Generator) -> Trial:
    """Return a sentence with a number, other text, and the sentence again; the answer is the number."""
    answer = f" {random.integers(10_000, 100_000)}"
    return _asked_after(source, ["The pass key is"], [answer], ". Remember it.\n", 0, distance, random)


def needle(source: ProbeText, distance: int, random: np.random.Generator) -> Trial:
    """Return sentences that each give a name a word, other text, and one sentence again; the answer is its word."""
    if len(source.words) < 2 * NEEDLES:
        raise UsageError("--probes: the text has too few words for needle. Name another text with --data.")
    chosen = random.choice(source.words, 2 * NEEDLES, replace=False)
    statements = [f"The secret word of {name} is" for name in chosen[:NEEDLES]]
    answers = [f" {word}" for word in chosen[NEEDLES:]]
    return _asked_after(source, statements, answers, ".\n", int(random.integers(NEEDLES)), distance, random)


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
    tokens = np.flatnonzero(tokenizer.token_bytes)
    if len(tokens) < 4 * PAIRS:
        raise UsageError(
            f"--probes: the vocabulary has {len(tokens)} tokens of text, and probes take {4 * PAIRS}. Name another run."
        )
    return tokens


def _asked_after(
    source: ProbeText,
    statements: list[str],
    answers: list[str],
    end: str,
    chosen: int,
    distance: int,
    random: np.random.Generator,
) -> Trial:
    """Return sentences with their answers, `distance` tokens of other text, and one of the sentences again."""
    encode = source.tokenizer.encode
    sentences = [encode(words) + encode(answer) for words, answer in zip(statements, answers, strict=True)]
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
