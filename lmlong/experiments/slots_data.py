"""The data of the slots experiment: texts of which some tokens are hidden.

R rows, T tokens.
"""

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lmlong import recipe
from lmlong.data.masking import Masker
from lmlong.data.token_dataset import TokenDataset, prepare
from lmlong.experiments.slots_grid import AT_ONCE, EncoderSetting
from lmlong.model.loss import IGNORED
from lmlong.recipe import file as recipe_file
from lmlong.recipe.text import Masking

HIDDEN = 0.5
"""Share of the second half of a copy that is hidden."""

SYMBOLS = 16
"""The number of symbols in copies; a guess is right with probability 1 / SYMBOLS."""

TESTS = 16
"""Number of blocks of AT_ONCE tokens in a test."""


class MaskedBatch(NamedTuple):
    """Rows with some tokens replaced by the mask token, and the hidden tokens as targets."""

    tokens: Tensor  # (R, T)
    targets: Tensor  # (R, T), IGNORED where nothing is hidden


class MaskedTask(NamedTuple):
    """The batches of training and of the test, each a function of its number."""

    vocabulary: int
    identity: list[object]  # of the text
    step: Callable[[int], MaskedBatch]
    test: Callable[[int], MaskedBatch]


def task_of(setting: EncoderSetting, seed: int) -> MaskedTask:
    return copies(setting.length, seed) if setting.task == "copies" else words(setting.length, seed)


def copies(length: int, seed: int) -> MaskedTask:
    """Return random symbols and their repetition, in which some are hidden: only the token length / 2 back predicts
    them."""

    def drawn(*key: int) -> MaskedBatch:
        draw = np.random.default_rng((seed, *key))
        symbols = draw.integers(SYMBOLS, size=(AT_ONCE // length, length // 2))
        hidden = draw.random(symbols.shape) < HIDDEN
        first = symbols, np.full_like(symbols, IGNORED)
        second = np.where(hidden, SYMBOLS, symbols), np.where(hidden, symbols, IGNORED)
        return MaskedBatch(
            *(torch.from_numpy(np.concatenate(halves, axis=1)) for halves in zip(first, second, strict=True))
        )

    return MaskedTask(
        SYMBOLS, [SYMBOLS, HIDDEN, AT_ONCE, TESTS], lambda step: drawn(0, step), lambda number: drawn(1, number)
    )


@cache
def _dataset() -> TokenDataset:
    return prepare(recipe_file.load("compare").text)


def words(length: int, seed: int) -> MaskedTask:
    """Return windows of the text of the recipe `compare`; the test hides the same tokens at every length."""
    tokens = _dataset()
    (train,), test, vocabulary = tokens.train, tokens.validation.tokens, tokens.tokenizer.vocabulary
    masker = Masker(Masking(kind="plain"), tokens.tokenizer)

    def windows(text: np.ndarray, begins: np.ndarray, *key: int) -> MaskedBatch:
        rows = [masker.mask_row(text[begin : begin + length].astype(np.int64), key, begin) for begin in begins.tolist()]
        return MaskedBatch(*(torch.from_numpy(np.stack(part)) for part in zip(*rows, strict=True)))

    def step(number: int) -> MaskedBatch:
        draw = np.random.default_rng((seed, number))
        begins = draw.integers(len(train.tokens) - length, size=AT_ONCE // length)
        return windows(train.tokens, begins, seed, 0, number)

    def block(number: int) -> MaskedBatch:
        begin = number * ((len(test) - AT_ONCE) // TESTS)
        return windows(test, np.arange(begin, begin + AT_ONCE, length), seed, 1)

    return MaskedTask(vocabulary, [tokens.identity, AT_ONCE, TESTS], step, block)


def encoder_options(setting: EncoderSetting, width: int) -> recipe.Model:
    """Return the options of an encoder of two layers with heads of width 32; only the attention differs."""
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
