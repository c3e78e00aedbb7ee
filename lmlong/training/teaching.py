"""The teacher of a run, from its own run."""

from pathlib import Path
from typing import NamedTuple

from lmlong import recipe
from lmlong.checkpoint import manifest, read
from lmlong.data.tokenizer import Tokenizer
from lmlong.errors import UsageError
from lmlong.model.build import build
from lmlong.model.language_model import LanguageModel
from lmlong.model.loss import Softening
from lmlong.model.teacher import Teacher


class Teaching(NamedTuple):
    """A teacher, with what tells it from others."""

    teacher: Teacher
    tokenizer: Tokenizer
    weights_hash: str


def open_teacher(options: recipe.Training) -> Teaching | None:
    """Return the teacher that a recipe names, if any."""
    if options.teacher is None:
        return None
    soft = Softening(options.teacher_share, options.teacher_temperature)
    return read.reading(options.teacher, lambda checkpoint: _read(checkpoint, options.teacher, soft))


def check_tokenizer(teaching: Teaching, tokenizer: Tokenizer, named: str | None) -> None:
    """Refuse a teacher to whom the numbers of tokens mean something else."""
    if teaching.tokenizer.hash != tokenizer.hash:
        raise UsageError(
            f"training.teacher: {named} has another tokenizer than training.init_from. Choose two runs with the same, "
            "or leave one out."
        )


def _read(checkpoint: Path, named: str | None, soft: Softening) -> Teaching:
    trained, tokenizer = read.read_recipe(checkpoint), read.read_tokenizer(checkpoint)
    read.check_size(checkpoint, trained, lambda trained: build(trained, tokenizer.vocabulary))
    model = build(trained, tokenizer.vocabulary)
    if not isinstance(model, LanguageModel):
        raise UsageError(f"training.teacher: {named} is an encoder, which predicts no next token. Name another run.")
    read.load_weights(model, checkpoint)
    weights_hash = manifest.read(checkpoint).files[manifest.WEIGHTS]["sha256"]
    return Teaching(Teacher(model, soft), tokenizer, weights_hash)
