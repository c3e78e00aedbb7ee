"""Perplexity against length: the same text, read in windows of several lengths.

At each length the text is cut into windows of that many tokens, and each window is read from an empty state. Every
token of the text but the first is a target at every length (only what follows the end of a document never is one), so
all lengths are compared on the same targets, and what differs is how far back the model could look.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from lmlong.errors import UsageError
from lmlong.evaluation.lengths import name_length
from lmlong.inference.loading import Loaded
from lmlong.inference.state_size import StateSize, state_size
from lmlong.model.language_model import parameters
from lmlong.model.scoring import Totals, score
from lmlong.recipe import Files, Text, Validation
from lmlong.text.batches import validation_batches
from lmlong.text.tokens import prepare

LENGTHS = (256, 1024, 4096, 16_384)
"""What is measured, beside the trained length, when nothing is asked for."""

TOKENS_AT_ONCE = 16_384
"""Short windows are read side by side, as many as make about so many tokens."""


class AtLength(NamedTuple):
    """What one model lost in windows of one length."""

    length: int
    totals: Totals
    seconds: float


@dataclass(frozen=True)
class Curve:
    """One model measured at several lengths."""

    name: str
    checkpoint: str
    parameters: int
    state: StateSize
    trained_length: int
    points: list[AtLength]
    left_out: list[int]  # lengths that the text does not reach


def measure(name: str, loaded: Loaded, text: np.ndarray, lengths: Sequence[int] | None = None) -> Curve:
    """A model's curve over the tokens of a text, by default at the usual lengths and the one it was trained at."""
    trained = loaded.recipe.text.sequence_length
    wanted = sorted({*LENGTHS, trained}) if lengths is None else lengths
    reached = [length for length in wanted if length < len(text)]
    if not reached:
        raise UsageError(f"--lengths: the text has {len(text):,} tokens and must be longer than one of the lengths.")
    with tqdm(total=len(reached) * (len(text) - 1), unit="token", unit_scale=True, leave=False, disable=None) as bar:
        points = []
        for length in reached:
            bar.set_description(f"{name} at {name_length(length)}")
            points.append(at_length(loaded, text, length, bar))
    return Curve(
        name=name,
        checkpoint=str(loaded.checkpoint),
        parameters=parameters(loaded.model),
        state=state_size(loaded.model),
        trained_length=trained,
        points=points,
        left_out=[length for length in wanted if length not in reached],
    )


def at_length(loaded: Loaded, text: np.ndarray, length: int, bar: tqdm) -> AtLength:
    """Score every token of a text but the first, in windows of one length."""
    begun = time.perf_counter()
    token_bytes = torch.from_numpy(loaded.tokenizer.token_bytes).to(_device(loaded))
    totals = score(loaded.model, _batches(loaded, text, length, bar), token_bytes)
    return AtLength(length, totals, time.perf_counter() - begun)


def validation_text(loaded: Loaded, files: Sequence[str] = (), limit: int | None = None) -> np.ndarray:
    """The tokens to measure on: the text held out of the model's training, or all of some files; the first `limit`."""
    text = loaded.recipe.text
    if files:
        source = Files(kind="files", paths=list(files))
        # a recipe's text trains too; the shortest sequence lets files of any size pass as that
        text = Text(sources=[source], validation=Validation(sources=[source]), errors=text.errors, sequence_length=8)
    return prepare(text, loaded.tokenizer).validation.tokens[:limit]


def _batches(loaded: Loaded, text: np.ndarray, length: int, bar: tqdm) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Windows of a text on the model's device; the bar moves on when a batch has been read."""
    bos, eos, rows = loaded.tokenizer.bos, loaded.tokenizer.eos, max(1, TOKENS_AT_ONCE // length)
    done = 0
    for batch in validation_batches(text, bos, eos, length, rows):
        tokens, targets, starts = (torch.from_numpy(part).to(_device(loaded)) for part in batch)
        yield tokens, targets, starts
        now = min(done + tokens.numel(), len(text) - 1)  # the last window may be padded
        bar.update(now - done)
        done = now


def _device(loaded: Loaded) -> torch.device:
    return loaded.model.embedding.weight.device
