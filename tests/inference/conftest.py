"""Tiny models with random weights, alone and as a run on disk."""

from collections.abc import Callable
from pathlib import Path

import pytest
from models import stirred

from lmlong.checkpoint.write import Contents, point, write
from lmlong.data.tokenizer import ByteTokenizer
from lmlong.model.language_model import LanguageModel
from lmlong.recipe import Attention, Model, Recipe, Text, Tokenizer, Training
from lmlong.recipe import file as recipe_file


def tiny(kind: str = "linear") -> Model:
    return Model(width=16, layers=2, heads=2, attention=Attention(kind=kind))


@pytest.fixture
def model_of() -> Callable[[str], LanguageModel]:
    """A model of bytes in float64; different tokens are likeliest at different places."""

    def build(kind: str) -> LanguageModel:
        return stirred(LanguageModel(tiny(kind), ByteTokenizer().vocabulary)).double().eval()

    return build


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder with one checkpoint of a tiny model of bytes."""
    model, tokenizer = stirred(LanguageModel(tiny(), ByteTokenizer().vocabulary)), tmp_path / "tokenizer.model"
    ByteTokenizer().save(tokenizer)
    recipe = Recipe(text=Text(tokenizer=Tokenizer(kind="bytes")), model=tiny(), training=Training(steps=1))
    folder = tmp_path / "runs" / "tiny"
    checkpoint = folder / "checkpoints" / "step-00000001"
    write(checkpoint, Contents(model.state_dict(), {}, recipe_file.dump(recipe), tokenizer.read_bytes()))
    point(checkpoint.parent / "latest", checkpoint)
    return folder
