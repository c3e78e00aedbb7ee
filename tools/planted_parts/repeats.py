"""Sequences like those of a genome with repeated segments, and the bits that second copies take.

Each base depends on the last three (a Markov chain), so that a model can learn something at every position; a copy is
at a known distance, and may have mutations.
"""

import math
import random
from collections.abc import Sequence
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import torch

from lmlong.inference.loading import TrainedLanguageModel
from lmlong.model.language_model import LanguageModel
from lmlong.model.state_size import state_size
from lmlong.recipe.lengths import name_length
from lmlong.report.figure import Figure, Line, Panel, style
from lmlong.report.json_values import json_values
from lmlong.report.table import Column, format_table

BASES = "ACGT"
ORDER = 3
CHAIN = 20260301
"""The seed of the chain, the same for sequences of every seed."""

SEGMENT = 192
"""Length of a segment."""

MARGIN = 32
"""Smallest distance between segments."""


class Repeat(NamedTuple):
    """Two copies of a segment."""

    first: int  # index of the first copy
    distance: int  # from the first to the second copy
    length: int
    mutated: bool


class Genome(NamedTuple):
    """A sequence, and the repeats in it."""

    bases: str
    repeats: list[Repeat]


class Cost(NamedTuple):
    """The bits of the copies of one kind."""

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
        """The standard error of `saved`, over the repeats."""
        return float(np.std(np.subtract(self.first, self.second), ddof=1) / math.sqrt(len(self.first)))


class RepeatCosts(NamedTuple):
    """The bits of a genome under one model."""

    name: str
    state_bytes: int  # after the whole sequence
    bits_per_base: float  # of the whole sequence
    costs: list[Cost]


def chain_sequence(length: int, draw: random.Random) -> list[str]:
    """Draw bases, each by the probabilities of the three before."""
    of_chain = np.random.default_rng(CHAIN)
    contexts = map("".join, product(BASES, repeat=ORDER))
    weights = {context: of_chain.dirichlet([4.0] * 4).tolist() for context in contexts}
    bases = draw.choices(BASES, k=ORDER)
    for _ in range(length - ORDER):
        bases += draw.choices(BASES, weights["".join(bases[-ORDER:])])
    return bases[:length]


def plant_repeats(
    length: int, distances: Sequence[int], each: int, seed: int, segment: int = SEGMENT, mutation: float = 0.05
) -> Genome:
    """Return a sequence with repeats at each distance: `each` exact ones, and as many with a share of `mutation` of
    their bases mutated. No two overlap."""
    draw = random.Random(f"repeats {seed}")
    bases, taken, repeats = chain_sequence(length, draw), np.zeros(length + MARGIN, dtype=bool), []
    for distance, mutated in sorted(
        product(distances, (False, True)), reverse=True
    ):  # the widest first, which are hardest to place
        for _ in range(each):
            first = _free_index(taken, length, distance, segment, draw)
            copy = bases[first : first + segment]
            if mutated:
                copy = [draw.choice(BASES.replace(base, "")) if draw.random() < mutation else base for base in copy]
            bases[first + distance : first + distance + segment] = copy
            for begin in (first, first + distance):
                taken[max(begin - MARGIN, 0) : begin + segment + MARGIN] = True
            repeats.append(Repeat(first, distance, segment, mutated))
    return Genome("".join(bases), sorted(repeats))


def _free_index(taken: np.ndarray, length: int, distance: int, segment: int, draw: random.Random) -> int:
    """Draw an index at which both copies fit."""
    for _ in range(100_000):
        first = draw.randrange(length - distance - segment)
        second = first + distance
        if not taken[first : first + segment].any() and not taken[second : second + segment].any():
            return first
    raise AssertionError("the sequence is too short for so many repeats")


def training_sequence(length: int, seed: int, nearest: int = 256, farthest: int = 6000) -> str:
    """Return a sequence to train on: about a third of it are copies of earlier segments at random distances, some of
    them mutated."""
    draw = random.Random(f"training {seed}")
    bases, index = chain_sequence(length, draw), farthest
    while index < length - 800:
        segment = draw.randrange(64, 400)
        distance = round(math.exp(draw.uniform(math.log(max(nearest, segment)), math.log(farthest))))
        rate = draw.choice([0.0, 0.0, 0.02, 0.08])
        copy = bases[index - distance : index - distance + segment]
        bases[index : index + segment] = [draw.choice(BASES) if draw.random() < rate else base for base in copy]
        index += segment + draw.randrange(64, 800)
    return "".join(bases)


def repeat_costs(loaded: TrainedLanguageModel, genome: Genome, name: str) -> RepeatCosts:
    """Return the bits of both copies of each repeat under a model that reads the sequence along one state."""
    model = loaded.model
    assert isinstance(model, LanguageModel)
    tokens = torch.tensor([[loaded.tokenizer.bos, *loaded.tokenizer.encode(genome.bases)]], device=loaded.device)
    nats, _ = model.token_nll(tokens[:, :-1], tokens[:, 1:])
    bits = nats[0].double().cpu().numpy() / math.log(2)
    size = state_size(model)
    costs = []
    for distance, mutated in sorted({(repeat.distance, repeat.mutated) for repeat in genome.repeats}):
        repeats = [repeat for repeat in genome.repeats if (repeat.distance, repeat.mutated) == (distance, mutated)]
        begins = [(repeat.first, repeat.first + distance, repeat.length) for repeat in repeats]
        first = [float(bits[begin : begin + size].mean()) for begin, _, size in begins]
        second = [float(bits[begin : begin + size].mean()) for _, begin, size in begins]
        costs.append(Cost(distance, mutated, first, second))
    size_after = size.empty.bytes + len(genome.bases) * size.per_token.bytes
    return RepeatCosts(name, size_after, float(bits.mean()), costs)


COLUMNS = [
    Column("model", 16, align="<"),
    Column("state", 11),
    Column("distance", 10),
    Column("first", 8, ".2f"),
    Column("second", 8, ".2f"),
    Column("saved", 9, ".2f"),
    Column("±", 7, ".2f"),
    Column("mutated", 9, ".2f"),
]


def table(models: Sequence[RepeatCosts]) -> str:
    """Return bits per base of first and second copies at each distance, and of second ones with mutations."""
    rows = []
    for each in models:
        exact = [cost for cost in each.costs if not cost.mutated]
        mutated = {cost.distance: cost for cost in each.costs if cost.mutated}
        for number, cost in enumerate(exact):
            of_model = [each.name, f"{each.state_bytes / 1e6:,.1f} MB"] if number == 0 else ["", ""]
            with_mutations = float(np.mean(mutated[cost.distance].second)) if cost.distance in mutated else None
            first, second = float(np.mean(cost.first)), float(np.mean(cost.second))
            distance = name_length(cost.distance)
            rows.append([*of_model, distance, first, second, cost.saved, cost.error, with_mutations])
    return "\n".join(format_table(COLUMNS, rows))


def to_json(models: Sequence[RepeatCosts], bases: int, seed: int) -> dict[str, Any]:
    """Return the bits per base of every copy."""
    return json_values({"bases": bases, "seed": seed, "models": models})


def figure(models: Sequence[RepeatCosts]) -> Figure:
    """Return bits per base of second copies against their distance, for exact copies and those with mutations."""
    panels = [_panel(models, mutated) for mutated in (False, True)]
    return Figure([panels], (11, 5), share_y=True, legend_columns=4)


def _panel(models: Sequence[RepeatCosts], mutated: bool) -> Panel:
    lines = []
    for number, each in enumerate(models):
        costs = [cost for cost in each.costs if cost.mutated == mutated]
        x = [cost.distance for cost in costs]
        label = f"{each.name}, {each.state_bytes / 1e6:,.1f} MB"
        look = style(number)
        lines.append(Line(label, x, [float(np.mean(cost.second)) for cost in costs], look, errors=_errors(costs)))
    first = models[0].costs
    mean = float(np.mean([bits for cost in first if cost.mutated == mutated for bits in cost.first]))
    x = sorted({cost.distance for cost in first})
    lines.append(
        Line(f"first copies, {models[0].name}", x, [mean] * len(x), style(4)._replace(marker=None, dashes=":"))
    )
    title = "second copies, with mutations" if mutated else "second copies, exact"
    return Panel(lines, title, "bases between the copies", "bits per base", x, name_length, y_range=(0, None))


def _errors(costs: Sequence[Cost]) -> list[float]:
    return [float(np.std(cost.second, ddof=1) / len(cost.second) ** 0.5) for cost in costs]
