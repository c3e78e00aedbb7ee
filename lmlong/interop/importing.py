"""Import a pretrained model as a run folder."""

from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from lmlong import recipe
from lmlong.checkpoint import manifest
from lmlong.checkpoint.write import Forms, write_imported
from lmlong.data.tokenizers.huggingface import HuggingFaceTokenizer
from lmlong.errors import CheckpointError, UsageError, install_command
from lmlong.interop.architecture import Source, check_layers, check_weights
from lmlong.interop.exporting import staged_folder
from lmlong.interop.gguf_file import open_gguf
from lmlong.interop.hf_folder import open_folder
from lmlong.io.files import check_ordinary
from lmlong.model.build import build, without_memory
from lmlong.recipe import file as recipe_file
from lmlong.report.progress import each

GGUF = b"GGUF"
SUPPORTED = "Name a folder that transformers wrote, or a GGUF file."


class Imported(NamedTuple):
    """The run that was written."""

    run: Path
    parameters: int
    context: int  # tokens per sequence in its training
    lost: list[int]  # bytes without a token
    left_out: Sequence[str]  # weights, in words


def import_model(path: Path, run: Path) -> Imported:
    """Write the run folder of a pretrained model: a folder of transformers or a GGUF file."""
    source = open_source(path)
    options = source.model
    check_layers(source)
    tokenizer = _tokenizer(source)
    context = source.config.max_position_embeddings
    run_recipe = recipe.Recipe(
        name=run.name,
        text=recipe.Text(
            tokenizer=recipe.Tokenizer(
                kind="huggingface",
                vocabulary=tokenizer.vocabulary,
                path=str(run.resolve() / manifest.TOKENIZER),
            ),
            sequence_length=context,
        ),
        model=options,
    )
    with without_memory():
        shapes = {
            name: tuple(weight.shape) for name, weight in build(run_recipe, tokenizer.vocabulary).state_dict().items()
        }
    check_weights(source, options, shapes)
    forms = {name: (torch.Size(shape), source.dtype(source.part(name, options))) for name, shape in shapes.items()}
    shown = each(weights(source, options, forms), f"weights of {run.name}", len(shapes), "tensors")
    _write(run, run_recipe, tokenizer.file, forms, shown)
    count = sum(shape.numel() for shape, _ in forms.values())
    return Imported(run, count, context, tokenizer.lost, source.left_out)


def _tokenizer(source: Source) -> HuggingFaceTokenizer:
    """Return the tokenizer of a model. If it is invalid, raise CheckpointError, since it is part of the model."""
    if find_spec("tokenizers") is None:
        raise UsageError(f"{source.name}: tokenizers is not installed. Run {install_command('import')}.")
    try:
        return HuggingFaceTokenizer(source.tokenizer(), source.name)
    except UsageError as error:
        raise CheckpointError(str(error)) from None


def open_source(path: Path) -> Source:
    """Return the model in a file or folder. Its content determines the format."""
    if not path.exists():
        fetch = "Nothing is downloaded here: fetch the model first, for example by"
        if path.suffix.lower() == ".gguf":
            raise UsageError(
                f"{path}: no such file or folder. {fetch} `hf download OWNER/REPOSITORY {path.name} --local-dir .`, "
                "then import that file."
            )
        name = path.as_posix() if len(path.parts) == 2 else f"OWNER/{path.name}"
        raise UsageError(
            f"{path}: no such file or folder. {fetch} "
            f"`hf download {name} --local-dir {path.name}` or `git clone https://huggingface.co/{name}`, then import "
            "that folder."
        )
    if path.is_dir():
        return open_folder(path)
    try:
        check_ordinary(path)
        with path.open("rb") as file:
            begin = file.read(4)
        if begin == GGUF:
            return open_gguf(path)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror}). {SUPPORTED}") from None
    pickled = begin[:2] == b"PK" or begin[:1] == b"\x80"
    raise UsageError(
        f"{path}: {'may run code, and is not read' if pickled else 'not a known model format'}. {SUPPORTED}"
    )


def weights(source: Source, model: recipe.Model, forms: Forms) -> Iterator[Tensor]:
    """Yield the weights of the run's model, with one in memory at a time."""
    for name, (_, dtype) in forms.items():
        part = source.part(name, model)
        weight = part.join([source.read(own).to(dtype) for own in part.names])
        if not weight.isfinite().all():
            raise CheckpointError(f"{source.name}: {part.names[0]} has infinite or NaN values. Use another model.")
        yield weight.contiguous()


def _write(run: Path, run_recipe: recipe.Recipe, tokenizer: bytes, forms: Forms, weights: Iterator[Tensor]) -> None:
    """Write the run folder atomically."""
    if run.exists():
        raise UsageError(f"{run}: exists. Choose another --out.")
    text = recipe_file.dump(run_recipe)
    with staged_folder(run, "Nothing was imported.") as staged:
        checkpoint = staged / "checkpoints" / "step-00000000"
        checkpoint.parent.mkdir()
        write_imported(checkpoint, forms, weights, text, tokenizer)
        (staged / manifest.RECIPE).write_bytes(text.encode())
        (staged / manifest.TOKENIZER).write_bytes(tokenizer)
