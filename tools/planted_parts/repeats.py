"""Sequences like those of a genome, in which segments come again, and what second copies cost a model.

The bases follow from the last three (a Markov chain), so that a model has something to learn of any place; a copy lies
at a known distance, and may have mutations.
"""

import math
import random
from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

import numpy as np
import torch

from lmlong.inference.loading import TrainedLanguageModel
from lmlong.model.language_model import LanguageModel
from lmlong.model.state_size import state_size

BASES = "ACGT"
ORDER = 3
CHAIN = 20260301
"""The seed of the chain: sequences of every seed are of one species."""

SEGMENT = 192
"""Bases of a segment that is copied."""

MARGIN = 32
"""Bases at least between what is planted."""


class Repeat(NamedTuple):
    """Two copies of a segment."""

    first: int  # where the first begins
    distance: int  # from there to where the second begins
    length: int
    mutated: bool


class Genome(NamedTuple):
    """A sequence, and the repeats in it."""

    bases: str
    repeats: list[Repeat]


class Cost(NamedTuple):
    """What copies of one kind cost, in bits."""

    distance: int
    mutated: bool
    first: list[float]  # bits per base of each first copy
    second: list[float]

    @property
    def saved(self) -> float:
        """The mean of first minus second copies."""
        return float(np.mean(np.subtract(self.first, self.second)))

    @property
    def error(self) -> float:
        """The standard error of what is saved, over the repeats."""
        return float(np.std(np.subtract(self.first, self.second), ddof=1) / math.sqrt(len(self.first)))


class RepeatCosts(NamedTuple):
    """What a model makes of a genome."""

    name: str
    state_bytes: int  # after the whole sequence
    bits_per_base: float  # of the whole sequence
    costs: list[Cost]


def chain_sequence(length: int, draw: random.Random) -> list[str]:
    """Draw bases, each by the probabilities of the three before."""
    of_chain = np.random.default_rng(CHAIN)
    contexts = map("".join, product(BASES, repeat=ORDER))
    weights = {context: of_chain.dirichlet([4.0] * 4).tolist() for context in contexts}
    found = draw.choices(BASES, k=ORDER)
    for _ in range(length - ORDER):
        found += draw.choices(BASES, weights["".join(found[-ORDER:])])
    return found[:length]


def plant_repeats(
    length: int, distances: Sequence[int], each: int, seed: int, segment: int = SEGMENT, mutation: float = 0.05
) -> Genome:
    """Return a sequence in which segments come again at each distance: `each` exact, and as many with so large a share
    of their bases mutated. No two overlap."""
    draw = random.Random(f"repeats {seed}")
    bases, taken, repeats = chain_sequence(length, draw), np.zeros(length + MARGIN, dtype=bool), []
    for distance, mutated in sorted(
        product(distances, (False, True)), reverse=True
    ):  # the widest first: they fit least
        for _ in range(each):
            first = _free_place(taken, length, distance, segment, draw)
            copy = bases[first : first + segment]
            if mutated:
                copy = [draw.choice(BASES.replace(base, "")) if draw.random() < mutation else base for base in copy]
            bases[first + distance : first + distance + segment] = copy
            for begin in (first, first + distance):
                taken[max(begin - MARGIN, 0) : begin + segment + MARGIN] = True
            repeats.append(Repeat(first, distance, segment, mutated))
    return Genome("".join(bases), sorted(repeats))


def _free_place(taken: np.ndarray, length: int, distance: int, segment: int, draw: random.Random) -> int:
    """Draw where both copies can lie."""
    for _ in range(100_000):
        first = draw.randrange(length - distance - segment)
        second = first + distance
        if not taken[first : first + segment].any() and not taken[second : second + segment].any():
            return first
    raise AssertionError("the sequence is too short for so many repeats")


def training_sequence(length: int, seed: int, nearest: int = 256, farthest: int = 6000) -> str:
    """Return a sequence to train on: about a third of it are copies of what stands at drawn distances before, some of
    them mutated."""
    draw = random.Random(f"training {seed}")
    bases, place = chain_sequence(length, draw), farthest
    while place < length - 800:
        segment = draw.randrange(64, 400)
        distance = round(math.exp(draw.uniform(math.log(max(nearest, segment)), math.log(farthest))))
        rate = draw.choice([0.0, 0.0, 0.02, 0.08])
        copy = bases[place - distance : place - distance + segment]
        bases[place : place + segment] = [draw.choice(BASES) if draw.random() < rate else base for base in copy]
        place += segment + draw.randrange(64, 800)
    return "".join(bases)


def repeat_costs(loaded: TrainedLanguageModel, genome: Genome, name: str) -> RepeatCosts:
    """Return what both copies of each repeat cost a model, which reads the sequence along one state."""
    model = loaded.model
    assert isinstance(model, LanguageModel)
    tokens = torch.tensor([[loaded.tokenizer.bos, *loaded.tokenizer.encode(genome.bases)]], device=loaded.device)
    nats, _ = model.token_nll(tokens[:, :-1], tokens[:, 1:])
    bits = nats[0].double().cpu().numpy() / math.log(2)
    size = state_size(model)
    costs = []
    for distance, mutated in sorted({(repeat.distance, repeat.mutated) for repeat in genome.repeats}):
        some = [repeat for repeat in genome.repeats if (repeat.distance, repeat.mutated) == (distance, mutated)]
        first = [float(bits[one.first : one.first + one.length].mean()) for one in some]
        second = [float(bits[one.first + distance : one.first + distance + one.length].mean()) for one in some]
        costs.append(Cost(distance, mutated, first, second))
    size_after = size.empty.bytes + len(genome.bases) * size.per_token.bytes
    return RepeatCosts(name, size_after, float(bits.mean()), costs)
