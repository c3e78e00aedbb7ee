"""Tiny models with random weights, alone and as a run on disk."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from models import save_run, stirred

from lmlong import recipe
from lmlong.data.tokenizers import train_tokenizer
from lmlong.data.tokenizers.base import ByteTokenizer, Tokenizer
from lmlong.model.language_model import LanguageModel
from lmlong.recipe import Attention, Downsample, Model, Recipe, Text, Training

WORDS = "to be or not that is the question whether nobler in mind suffer slings and arrows of outrageous fortune"


def tiny(kind: str = "linear") -> Model:
    """Options of a tiny model; "downsampled" is one of three layers, of which one reads blocks."""
    if kind.startswith("downsampled"):
        attention = Attention(kind=kind.removeprefix("downsampled").strip() or "linear")
        return Model(width=16, layers=3, heads=2, attention=attention, downsample=Downsample(factor=4, kind="conv"))
    return Model(width=16, layers=2, heads=2, attention=Attention(kind=kind))


def prose(words: int, seed: int = 0) -> str:
    """Words in lines, the same for the same seed."""
    draw = random.Random(seed)
    return "".join(draw.choice(WORDS.split()) + draw.choice([" ", " ", " ", ", ", ".\n"]) for _ in range(words))


@pytest.fixture
def model_of() -> Callable[[str], LanguageModel]:
    """A model of bytes in float64; different tokens are likeliest at different places."""

    def build(kind: str) -> LanguageModel:
        return stirred(LanguageModel(tiny(kind), ByteTokenizer().vocabulary)).double().eval()

    return build


def write_run(
    folder: Path, tokenizer: Tokenizer, kind: str, deviation: float = 1.0, options: Model | None = None
) -> Path:
    """Write a run folder with one checkpoint of a tiny model."""
    options = options or tiny()
    made = Recipe(text=Text(tokenizer=recipe.Tokenizer(kind=kind)), model=options, training=Training(steps=1))
    return save_run(folder, made, stirred(LanguageModel(options, tokenizer.vocabulary), deviation), tokenizer)


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with one checkpoint of a tiny model of bytes."""
    return write_run(tmp_path_factory.mktemp("runs") / "tiny", ByteTokenizer(), "bytes")


@pytest.fixture(scope="session")
def subword_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same of a tiny model of subwords, each of whose tokens may follow every other."""
    tokenizer = train_tokenizer([prose(3000)], recipe.Tokenizer(vocabulary=600))
    return write_run(tmp_path_factory.mktemp("runs") / "subwords", tokenizer, "sentencepiece", 0.3)
