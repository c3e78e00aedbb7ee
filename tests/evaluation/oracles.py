"""A source whose entropy given N symbols is known in closed form, and a model that predicts it perfectly."""

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


class Oracle:
    """Predicts a source as well as possible from the last `memory` symbols since its state was empty. A hidden state is
    these symbols, padded with -1."""

    def __init__(self, source: Repeated, memory: int | None = None):
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


def text_of(source: Repeated, lengths: list[int], seed: int = 2) -> TokenFile:
    """Documents drawn from a source."""
    random = np.random.default_rng(seed)
    texts = [source.draw(length, random) for length in lengths]
    return TokenFile(np.concatenate(texts), np.cumsum([0, *lengths[:-1]]))
