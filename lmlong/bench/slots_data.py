"""What the encoders are trained and tested on: texts of which some tokens are hidden, and what these were.

R rows, T tokens.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lmlong import recipe
from lmlong.bench.slots_grid import AT_ONCE, Setting
from lmlong.model.loss import IGNORED
from lmlong.recipe import file as recipe_file
from lmlong.text.tokens import prepare

WORDS_HIDDEN, COPIES_HIDDEN = 0.15, 0.5
"""Shares of tokens that are hidden: of all words, and of the second half of a copy."""

SYMBOLS = 16
"""That copies are made of: one who cannot look back is right once in so many times."""

TESTS = 16
"""Blocks of AT_ONCE tokens that an encoder is tested on."""


class Hidden(NamedTuple):
    """Rows with a mask where a token was hidden, which is then the target."""

    tokens: Tensor  # (R, T)
    targets: Tensor  # (R, T), IGNORED where nothing is hidden


class Task(NamedTuple):
    """Where batches come from: functions of a number, those of tests apart from all of training."""

    vocabulary: int
    step: Callable[[int], Hidden]
    test: Callable[[int], Hidden]


def task_of(setting: Setting, seed: int) -> Task:
    return copies(setting.length, seed) if setting.task == "copies" else words(setting.length, seed)


def copies(length: int, seed: int) -> Task:
    """Random symbols said twice, some hidden the second time: nothing tells them but what stands length / 2 before."""

    def drawn(*key: int) -> Hidden:
        draw = np.random.default_rng((seed, *key))
        said = draw.integers(SYMBOLS, size=(AT_ONCE // length, length // 2))
        chosen = draw.random(said.shape) < COPIES_HIDDEN
        chosen = np.concatenate([np.zeros_like(chosen), chosen], axis=1)
        return hide(np.concatenate([said, said], axis=1), chosen, SYMBOLS)

    return Task(SYMBOLS, lambda step: drawn(0, step), lambda number: drawn(1, number))


def words(length: int, seed: int) -> Task:
    """Windows of the text of `lmlong recipe show compare`; the same tokens of the test are hidden at every length."""
    tokens = prepare(recipe_file.load("compare").text)
    (train,), test, vocabulary = tokens.train, tokens.validation.tokens, tokens.tokenizer.vocabulary

    def window(text: np.ndarray, begins: np.ndarray, draw: np.random.Generator) -> Hidden:
        found = np.stack([text[begin : begin + length] for begin in begins]).astype(np.int64)
        chosen = draw.random(AT_ONCE).reshape(found.shape) < WORDS_HIDDEN
        return hide(found, chosen, vocabulary)

    def step(number: int) -> Hidden:
        draw = np.random.default_rng((seed, 0, number))
        return window(train.tokens, draw.integers(len(train.tokens) - length, size=AT_ONCE // length), draw)

    def block(number: int) -> Hidden:
        begins = np.arange(0, AT_ONCE, length) + number * ((len(test) - AT_ONCE) // TESTS)
        return window(test, begins, np.random.default_rng((seed, 1, number)))

    return Task(vocabulary, step, block)


def hide(tokens: np.ndarray, chosen: np.ndarray, mask: int) -> Hidden:
    """The tokens with a mask at the chosen places, and what stood there."""
    return Hidden(torch.from_numpy(np.where(chosen, mask, tokens)), torch.from_numpy(np.where(chosen, tokens, IGNORED)))


def model_options(setting: Setting, width: int) -> recipe.Model:
    """Two layers of heads of width 32, all told of places alike, so that nothing but the attention differs."""
    linformer = recipe.Linformer.model_validate({"projected": setting.slots or 1, "sharing": setting.sharing})
    return recipe.Model(
        width=width,
        layers=2,
        heads=max(width // 32, 1),
        convolution=0,
        positions="absolute",
        attention=recipe.Attention(
            kind="full" if setting.slots is None else "linformer", decay="none", linformer=linformer
        ),
    )
