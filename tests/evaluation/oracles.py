"""Sources whose entropy given so many symbols is known in closed form, and models that predict them perfectly."""

import math

import numpy as np
import torch
from torch import Tensor

from lmlong.data.token_file import TokenFile


class Repeated:
    """A symbol is the one `distance` before it, but now and then any other; with less in view nothing is known."""

    def __init__(self, symbols: int, distance: int, wrong: float):
        self.symbols, self.distance, self.wrong = symbols, distance, wrong
        self.memory = distance  # symbols that a prediction takes

    def entropy(self, context: int) -> float:
        if context < self.distance:
            return math.log(self.symbols)
        return -(1 - self.wrong) * math.log(1 - self.wrong) - self.wrong * math.log(self.wrong / (self.symbols - 1))

    def draw(self, length: int, random: np.random.Generator) -> np.ndarray:
        text = random.integers(self.symbols, size=length)
        changed = random.random(length) < self.wrong
        shift = random.integers(1, self.symbols, size=length)
        for place in range(self.distance, length):
            text[place] = (text[place - self.distance] + changed[place] * shift[place]) % self.symbols
        return text

    def likelihood(self, known: list[int]) -> np.ndarray:
        if len(known) < self.distance:
            return np.full(self.symbols, 1 / self.symbols)
        chances = np.full(self.symbols, self.wrong / (self.symbols - 1))
        chances[known[-self.distance]] = 1 - self.wrong
        return chances


class Markov:
    """Symbols that follow from the two before them by a drawn table."""

    memory = 2

    def __init__(self, symbols: int, seed: int):
        self.symbols = symbols
        self.table = np.random.default_rng(seed).dirichlet([0.3] * symbols, size=(symbols, symbols))
        pairs = np.full((symbols, symbols), symbols**-2.0)
        for _ in range(1000):
            pairs = np.einsum("ab,abc->bc", pairs, self.table)
        self.pairs = pairs  # how often one symbol follows another, in the long run
        self.given = [pairs.sum(0), pairs / pairs.sum(1, keepdims=True), self.table]

    def entropy(self, context: int) -> float:
        weights = [np.ones(()), self.pairs.sum(1), self.pairs][min(context, 2)]
        chances = self.given[min(context, 2)]
        return float(-(weights[..., None] * chances * np.log(chances)).sum())

    def draw(self, length: int, random: np.random.Generator) -> np.ndarray:
        text = list(divmod(random.choice(self.symbols**2, p=self.pairs.flatten()), self.symbols))
        while len(text) < length:
            text.append(random.choice(self.symbols, p=self.table[text[-2], text[-1]]))
        return np.array(text[:length])

    def likelihood(self, known: list[int]) -> np.ndarray:
        seen = min(len(known), 2)
        return self.given[seen][tuple(known[len(known) - seen :])]


class Oracle:
    """Predicts a source from what it has read since its state was empty, as well as can be from its last `memory`
    symbols; a hidden state is these symbols, after as many -1 as they are fewer."""

    def __init__(self, source: Repeated | Markov, memory: int | None = None):
        self.source, self.memory = source, source.memory if memory is None else memory

    def hidden_states(self, tokens: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        state = tokens.new_full((len(tokens), self.memory), -1) if state is None else state
        known = torch.cat([state, tokens], dim=1)
        return known.unfold(1, self.memory, 1)[:, 1:], known[:, known.shape[1] - self.memory :]

    def logits(self, hidden: Tensor) -> Tensor:
        known = [[symbol for symbol in row if symbol >= 0] for row in hidden.tolist()]
        chances = np.array([self.source.likelihood(row) for row in known]).reshape(len(known), self.source.symbols)
        return torch.from_numpy(np.log(chances))

    def target_nll(self, hidden: Tensor, targets: Tensor) -> Tensor:
        return -self.logits(hidden).gather(1, targets[:, None])[:, 0]


def text_of(source: Repeated | Markov, lengths: list[int], seed: int = 2) -> TokenFile:
    """Documents drawn from a source."""
    random = np.random.default_rng(seed)
    texts = [source.draw(length, random) for length in lengths]
    return TokenFile(np.concatenate(texts), np.cumsum([0, *lengths[:-1]]))
