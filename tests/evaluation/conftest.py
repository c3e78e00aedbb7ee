"""A run on disk whose validation text is known to the byte."""

from pathlib import Path

import pytest
from machine import new_cache
from models import save_run, stirred

from lmlong.data.tokenizers.base import ByteTokenizer
from lmlong.inference.loading import TrainedLanguageModel, load
from lmlong.model.build import build
from lmlong.recipe import Attention, Files, Model, Recipe, Text, Tokenizer, Training, Validation

TRAINING_TEXT = "tomorrow and tomorrow and tomorrow " * 4
VALIDATION_TEXTS = ["creeps in this petty pace – from day to day " * 9, "to the last syllable of recorded time\n" * 8]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run folder with a checkpoint of a tiny model of bytes, trained at 64 tokens as its recipe says."""
    monkeypatch.setenv("LMLONG_CACHE", str(new_cache(tmp_path)))
    (tmp_path / "train.txt").write_text(TRAINING_TEXT)
    for number, text in enumerate(VALIDATION_TEXTS):
        (tmp_path / f"validation-{number}.txt").write_text(text)
    recipe = Recipe(
        text=Text(
            sources=[Files(kind="files", paths=[str(tmp_path / "train.txt")])],
            validation=Validation(sources=[Files(kind="files", paths=[str(tmp_path / "validation-*.txt")])]),
            tokenizer=Tokenizer(kind="bytes"),
            sequence_length=64,
        ),
        model=Model(width=16, layers=2, heads=2, attention=Attention(kind="linear")),
        training=Training(steps=7, batch_size=2, accumulate=3),
    )
    return save_run(tmp_path / "runs" / "tiny", recipe, stirred(build(recipe, 258)), ByteTokenizer(), 7)


@pytest.fixture
def loaded(run: Path) -> TrainedLanguageModel:
    return load(run, "cpu")
