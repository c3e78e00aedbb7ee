"""The teacher of a run, from its own run."""

from pathlib import Path
from typing import NamedTuple

from lmlong import recipe
from lmlong.checkpoint import manifest, read
from lmlong.data.tokenizers.base import Tokenizer
from lmlong.errors import UsageError
from lmlong.model.base import TextModel
from lmlong.model.build import build
from lmlong.model.language_model import LanguageModel
from lmlong.model.loss import Softening
from lmlong.training.teacher import Teacher


class Teaching(NamedTuple):
    """A teacher, with what tells it from others."""

    teacher: Teacher
    tokenizer: Tokenizer
    weights_hash: str


def open_teacher(options: recipe.Training) -> Teaching | None:
    """Return the teacher that a recipe names, if any."""
    if options.teacher is None:
        return None
    learned = Softening(options.teacher_share, options.teacher_temperature)
    soft = learned if options.teacher_of == "predictions" else None
    return read.reading(options.teacher, lambda checkpoint: _read(checkpoint, options.teacher, soft))


def align(student: TextModel, teacher: LanguageModel) -> None:
    """Let a student train its mixers alone, whose outputs are to be those of a teacher."""
    assert isinstance(student, LanguageModel)
    shapes = [(len(model.blocks), model.embedding.embedding_dim) for model in (student, teacher)]
    if shapes[0] != shapes[1]:
        (layers, width), (their_layers, their_width) = shapes
        raise UsageError(
            f"training.teacher_of: the teacher has {their_layers} layers of width {their_width}, the model {layers} of "
            f"width {width}. To learn its layers there must be as many, as wide; leave out teacher_of else."
        )
    if student.hourglass or teacher.hourglass:
        raise UsageError("training.teacher_of: layers of a shortened sequence are not compared. Leave it out.")
    student.requires_grad_(False)
    for block in student.blocks:
        block.mixer.requires_grad_(True)


def check_tokenizer(teaching: Teaching, tokenizer: Tokenizer, named: str | None) -> None:
    """Refuse a teacher to whom the numbers of tokens mean something else."""
    if teaching.tokenizer.hash != tokenizer.hash:
        raise UsageError(
            f"training.teacher: {named} has another tokenizer than training.init_from. Choose two runs with the same, "
            "or leave one out."
        )


def _read(checkpoint: Path, named: str | None, soft: Softening | None) -> Teaching:
    trained, tokenizer = read.read_recipe(checkpoint), read.read_tokenizer(checkpoint)
    read.check_size(checkpoint, trained, lambda trained: build(trained, tokenizer.vocabulary))
    model = build(trained, tokenizer.vocabulary)
    if not isinstance(model, LanguageModel):
        raise UsageError(f"training.teacher: {named} is an encoder, which predicts no next token. Name another run.")
    read.load_weights(model, checkpoint)
    weights_hash = manifest.read(checkpoint).files[manifest.WEIGHTS]["sha256"]
    return Teaching(Teacher(model, soft), tokenizer, weights_hash)
