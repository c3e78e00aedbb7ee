"""A checkpoint of a tiny model of bytes, and valid manifests for changed ones."""

from pathlib import Path

import pytest
import torch

from lmlong import recipe
from lmlong.checkpoint import manifest, write
from lmlong.data.tokenizers.base import ByteTokenizer
from lmlong.io.folder_manifest import manifest_text
from lmlong.model.language_model import LanguageModel
from lmlong.recipe import file as recipe_file

RECIPE = recipe.Recipe(
    model=recipe.Model(width=16, layers=1, heads=2), training=recipe.Training(steps=1), text=recipe.Text()
)


def model(seed: int = 0, **options: object) -> LanguageModel:
    torch.manual_seed(seed)
    return LanguageModel(RECIPE.model.model_copy(update=options), 258)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    tokenizer = tmp_path / "tokenizer"
    ByteTokenizer().save(tokenizer)
    folder = tmp_path / "run" / "checkpoints" / "step-00000007"
    training = {"step": 7, "optimizer.0.momentum": torch.arange(5.0)}
    contents = write.Contents(model().state_dict(), training, recipe_file.dump(RECIPE), tokenizer.read_bytes(), 7)
    write.write(folder, contents)
    return folder


def sign(checkpoint: Path, **about: object) -> None:
    """Rewrite the manifest, as an attacker would."""
    says = manifest.read(checkpoint)
    about = {"step": says.step, "validation": says.validation, **about}
    (checkpoint / manifest.NAME).write_text(manifest_text(checkpoint, manifest.FORMAT, about))
