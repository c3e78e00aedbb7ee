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
from lmlong.recipe.text import Masking
from lmlong.text.masking import Masker
from lmlong.text.tokens import prepare

HIDDEN = 0.5
"""Share of the second half of a copy that is hidden."""

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
    identity: list[object]  # of what is read
    step: Callable[[int], Hidden]
    test: Callable[[int], Hidden]


def task_of(setting: Setting, seed: int) -> Task:
    return copies(setting.length, seed) if setting.task == "copies" else words(setting.length, seed)


def copies(length: int, seed: int) -> Task:
    """Random symbols said twice, some hidden the second time: nothing tells them but what stands length / 2 before."""

    def drawn(*key: int) -> Hidden:
        draw = np.random.default_rng((seed, *key))
        said = draw.integers(SYMBOLS, size=(AT_ONCE // length, length // 2))
        chosen = draw.random(said.shape) < HIDDEN
        again = np.where(chosen, SYMBOLS, said), np.where(chosen, said, IGNORED)
        first = said, np.full_like(said, IGNORED)
        return Hidden(*(torch.from_numpy(np.concatenate(halves, axis=1)) for halves in zip(first, again, strict=True)))

    return Task(
        SYMBOLS, [SYMBOLS, HIDDEN, AT_ONCE, TESTS], lambda step: drawn(0, step), lambda number: drawn(1, number)
    )


def words(length: int, seed: int) -> Task:
    """Windows of the text of `lmlong recipe show compare`; the same tokens of the test are hidden at every length."""
    tokens = prepare(recipe_file.load("compare").text)
    (train,), test, vocabulary = tokens.train, tokens.validation.tokens, tokens.tokenizer.vocabulary
    masker = Masker(Masking(kind="plain"), tokens.tokenizer)

    def windows(text: np.ndarray, begins: np.ndarray, *key: int) -> Hidden:
        rows = [masker.hide(text[begin : begin + length].astype(np.int64), key, begin) for begin in begins.tolist()]
        return Hidden(*(torch.from_numpy(np.stack(part)) for part in zip(*rows, strict=True)))

    def step(number: int) -> Hidden:
        draw = np.random.default_rng((seed, number))
        begins = draw.integers(len(train.tokens) - length, size=AT_ONCE // length)
        return windows(train.tokens, begins, seed, 0, number)

    def block(number: int) -> Hidden:
        begin = number * ((len(test) - AT_ONCE) // TESTS)
        return windows(test, np.arange(begin, begin + AT_ONCE, length), seed, 1)

    return Task(vocabulary, [tokens.identity, AT_ONCE, TESTS], step, block)


def model_options(setting: Setting, width: int) -> recipe.Model:
    """Two layers of heads of width 32, alike in all but the attention."""
    linformer = recipe.Linformer.model_validate({"projected": setting.slots or 1, "sharing": setting.sharing})
    return recipe.Model(
        width=width,
        layers=2,
        heads=max(width // 32, 1),
        convolution=0,
        attention=recipe.Attention(
            kind="full" if setting.slots is None else "linformer", decay="none", linformer=linformer
        ),
    )
