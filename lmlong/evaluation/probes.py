"""Texts that ask for something said before: how far back a model finds it is how far it recalls.

copy, induction and mqar are of symbols drawn from the run's own vocabulary, and something is asked for exactly so many
tokens after it was said. passkey and needle hide a sentence in the held-out text and ask after so many tokens of it.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from lmlong.errors import UsageError
from lmlong.text.tokenizer import Tokenizer

PAIRS = 8
"""Keys and their values in one text of mqar."""

NEEDLES = 4
"""Sentences in one text of needle, of which one is asked for."""

SHORTEST = 2 * PAIRS
"""Tokens that all pairs take."""


class Material(NamedTuple):
    """What texts are made of."""

    tokenizer: Tokenizer
    text: np.ndarray  # tokens of the held-out text, without what frames documents
    words: list[str]  # that occur in it


class Trial(NamedTuple):
    """One text, and the places in it that hold the answers."""

    tokens: np.ndarray
    asked: np.ndarray


def copy(material: Material, distance: int, random: np.random.Generator) -> Trial:
    """Symbols, and all of them again; the first to be asked for is the second: that they return must show first."""
    said = random.choice(symbols(material.tokenizer), distance)
    return Trial(np.concatenate([said, said]), np.arange(distance + 1, 2 * distance))


def induction(material: Material, distance: int, random: np.random.Generator) -> Trial:
    """One symbol comes a second time: what followed it before?"""
    first, *others = random.permutation(symbols(material.tokenizer))
    filler = random.choice(others, distance - 1)
    return Trial(np.concatenate([[first], filler, [first], filler[:1]]), np.array([distance + 1]))


def mqar(material: Material, distance: int, random: np.random.Generator) -> Trial:
    """Keys with their values, then other symbols, then the keys again: what were their values?"""
    drawn = random.permutation(symbols(material.tokenizer))
    keys, others = drawn[:PAIRS], drawn[PAIRS:]
    pairs = np.stack([keys, random.choice(others, PAIRS)], axis=1).flatten()
    filler = random.choice(others, distance - 2 * PAIRS)
    return Trial(np.concatenate([pairs, filler, pairs]), distance + 1 + 2 * np.arange(PAIRS))


def passkey(material: Material, distance: int, random: np.random.Generator) -> Trial:
    """A number is told, then other text: which number was it?"""
    answer = f" {random.integers(10_000, 100_000)}"
    return _asked_after(material, ["The pass key is"], [answer], ". Remember it.\n", 0, distance, random)


def needle(material: Material, distance: int, random: np.random.Generator) -> Trial:
    """Several names get a word each, then other text: which word has one of the names?"""
    if len(material.words) < 2 * NEEDLES:
        raise UsageError("--probe: needle takes words, and the text has too few. Name another text with --data.")
    chosen = random.choice(material.words, 2 * NEEDLES, replace=False)
    told = [f"The secret word of {name} is" for name in chosen[:NEEDLES]]
    answers = [f" {word}" for word in chosen[NEEDLES:]]
    return _asked_after(material, told, answers, ".\n", int(random.integers(NEEDLES)), distance, random)


Maker = Callable[[Material, int, np.random.Generator], Trial]
PROBES: dict[str, Maker] = {
    "copy": copy,
    "induction": induction,
    "mqar": mqar,
    "passkey": passkey,
    "needle": needle,
}


def symbols(tokenizer: Tokenizer) -> np.ndarray:
    """Tokens that stand for text."""
    found = np.flatnonzero(tokenizer.token_bytes)
    if len(found) < 4 * PAIRS:
        raise UsageError(f"--probe: the vocabulary has {len(found)} tokens of text, probes take {4 * PAIRS} or more.")
    return found


def _asked_after(
    material: Material,
    told: list[str],
    answers: list[str],
    end: str,
    chosen: int,
    distance: int,
    random: np.random.Generator,
) -> Trial:
    """Sentences with their answers, `distance` tokens of other text, and one of the sentences again."""
    encode = material.tokenizer.encode
    sentences = [encode(words) + encode(answer) for words, answer in zip(told, answers, strict=True)]
    begin = int(random.integers(len(material.text)))
    filler = material.text.take(np.arange(begin, begin + distance), mode="wrap")
    tokens = [
        np.concatenate([np.array(sentence + encode(end)) for sentence in sentences]),
        filler.astype(np.int64),
        np.array(encode("\n") + sentences[chosen]),
    ]
    together = np.concatenate(tokens)
    answer = len(encode(answers[chosen]))
    return Trial(together, np.arange(len(together) - answer, len(together)))
