"""Models that the harness measures, and what is true of them by forward passes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from models import FORMS, predict, write_run

import lmlong
from lmlong import recipe
from lmlong.inference.loading import TrainedLanguageModel
from lmlong.model.language_model import LanguageModel

KINDS = {**FORMS, "hourglass": {"layers": 4, "downsample": recipe.Downsample(factor=4)}}
"""Models of every kind, those too that no other program runs."""

USUAL = ("elu", "softmax", "hourglass")
"""States of constant size, states that grow, and blocks; the others are slow."""

every_kind = pytest.mark.parametrize(
    "form", [pytest.param(form, marks=() if form in USUAL else pytest.mark.slow) for form in KINDS]
)

DOCUMENTS = ["abcabcabd" * 30, "a", "", "It was a dark night.\n" * 12, "é\u2581x"]
CONTEXTS = ["", "abc", "It was a dark ", "abcabcabd" * 40]
CHOICES = ["", "night", " cat", "abcabd" * 4, "x"]


def log_probabilities(model: LanguageModel, tokens: list[int]) -> torch.Tensor:
    """Log-probabilities (T, V) of what follows each token, by one forward pass."""
    with torch.inference_mode():
        return predict(model, torch.tensor([tokens]))[0][0].double().log_softmax(-1)


def by_forward(model: LanguageModel, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    found = log_probabilities(model, [*context, *continuation])[len(context) - 1 : -1]
    picked = found[torch.arange(len(continuation)), continuation]
    return float(picked.sum()), found.argmax(-1).tolist() == continuation


def greedy(model: LanguageModel, tokens: list[int], count: int, eos: int | None = None) -> list[int]:
    written: list[int] = []
    while len(written) < count and (not written or written[-1] != eos):
        written.append(int(log_probabilities(model, [*tokens, *written])[-1].argmax()))
    return written


def requests(kind: str, *arguments: tuple[Any, ...]) -> list[Any]:
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, each, number) for number, each in enumerate(arguments)]  # type: ignore[arg-type]


def loaded(folder: Path, form: str) -> TrainedLanguageModel:
    write_run(folder / "run", **KINDS[form])
    return lmlong.load(folder / "run", "cpu", state_dtype="32")
