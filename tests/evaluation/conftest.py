"""A run on disk whose validation text is known to the byte."""

from pathlib import Path

import pytest
from evaluation.texts import TRAINING_TEXT, VALIDATION_TEXTS
from models import stirred

from lmlong.checkpoint.write import Contents, point, write
from lmlong.data.tokenizers.base import ByteTokenizer
from lmlong.inference.loading import TrainedLanguageModel, load
from lmlong.model.language_model import LanguageModel
from lmlong.recipe import Attention, Files, Model, Recipe, Text, Tokenizer, Training, Validation
from lmlong.recipe import file as recipe_file


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run folder with a checkpoint of a tiny model of bytes, trained at 64 tokens as its recipe says."""
    monkeypatch.setenv("LMLONG_CACHE", str(tmp_path / "cache"))
    (tmp_path / "train.txt").write_text(TRAINING_TEXT)
    for number, text in enumerate(VALIDATION_TEXTS):
        (tmp_path / f"validation-{number}.txt").write_text(text)
    options = Model(width=16, layers=2, heads=2, attention=Attention(kind="linear"))
    recipe = Recipe(
        text=Text(
            sources=[Files(kind="files", paths=[str(tmp_path / "train.txt")])],
            validation=Validation(sources=[Files(kind="files", paths=[str(tmp_path / "validation-*.txt")])]),
            tokenizer=Tokenizer(kind="bytes"),
            sequence_length=64,
        ),
        model=options,
        training=Training(steps=7, batch_size=2, accumulate=3),
    )
    ByteTokenizer().save(tmp_path / "tokenizer.model")
    weights = stirred(LanguageModel(options, ByteTokenizer().vocabulary)).state_dict()
    folder = tmp_path / "runs" / "tiny"
    checkpoint = folder / "checkpoints" / "step-00000007"
    tokenizer = (tmp_path / "tokenizer.model").read_bytes()
    write(checkpoint, Contents(weights, {}, recipe_file.dump(recipe), tokenizer, 7))
    point(checkpoint.parent / "latest", checkpoint)
    return folder


@pytest.fixture
def loaded(run: Path) -> TrainedLanguageModel:
    return load(run, "cpu")
