"""Reading a checkpoint of a run, a name or a path.

Each file is verified before it is opened, unless `verify` is false because that was done already. Its content is always
validated too: a digest detects accidents, not attacks.
"""

import ctypes
import re
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from functools import partial
from mmap import PAGESIZE
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from lmlong.attention.state_check import REAL
from lmlong.checkpoint import manifest
from lmlong.checkpoint.location import BEST, find
from lmlong.checkpoint.manifest import RECIPE, TOKENIZER, TRAINING_TENSORS, TRAINING_VALUES, WEIGHTS
from lmlong.checkpoint.write import NAMES
from lmlong.data.tokenizers import load_tokenizer
from lmlong.data.tokenizers.base import Tokenizer
from lmlong.errors import CheckpointError, RecipeError, UsageError
from lmlong.io.files import parse_json
from lmlong.io.folder_manifest import MAX_SIZE
from lmlong.model.base import TextModel, quantize, quantize_matrix
from lmlong.model.block import SHARED_PARTS
from lmlong.model.build import Undrawn, build, without_memory
from lmlong.model.finite import is_finite
from lmlong.model.quantization import Weights
from lmlong.model.short_conv import ShortConvolution
from lmlong.recipe import Recipe
from lmlong.recipe import file as recipe_file
from lmlong.recipe.file import MissingPlugin

ADDED_HEADS = re.compile(r"blocks\.\d+\.ngram\.")
"""The beginning of the names of the weights of added n-gram heads."""

HEAD = "lm_head.output.weight"
"""The weight of an output layer that is not the embedding."""

LATER = ("pooled_norm.", "embedding_growth")
"""The beginnings of names of what older checkpoints of labels lack, and new models have so that it changes nothing."""

NUMBERS = {NAMES[dtype] for dtype in REAL}
"""The dtypes that weights may have, by their names in safetensors."""

MADV_DONTNEED = 4
"""The advice of Linux to take mapped memory away, which mmap does not define on other systems."""

T = TypeVar("T")


def reading(run: str | Path, use: Callable[[Path], T]) -> T:
    """Return `use(checkpoint)` for the best checkpoint of a run, which may be in training.

    Training removes checkpoints when there is a better one, even while they are being read. `use` is then called again
    with the better one, so it must have no side effects, and its result must not depend on files of the checkpoint.
    """
    checkpoint = find(run, BEST)
    while True:
        try:
            return use(checkpoint)
        except (CheckpointError, OSError) as error:
            better = find(run, BEST)
            if better == checkpoint and isinstance(error, OSError):
                raise CheckpointError(f"{error.filename or checkpoint}: cannot be read ({error.strerror}).") from error
            if better == checkpoint:
                raise
            checkpoint = better


def trained_tokens(checkpoint: Path) -> int:
    """Return the number of tokens that the weights were trained on, including earlier runs that they came from."""
    about = manifest.read(checkpoint)
    return (
        about.step * read_recipe(checkpoint).tokens_per_step if about.trained_tokens is None else about.trained_tokens
    )


def read_recipe(checkpoint: Path, verify: bool = True) -> Recipe:
    """Return the recipe that the weights were trained by."""
    if verify:
        manifest.verify(checkpoint, [RECIPE])
    try:
        # without a `load_plugin`: a checkpoint must not decide what is imported
        return recipe_file.load(str(checkpoint / RECIPE), as_trained=True)
    except MissingPlugin as error:
        raise CheckpointError(str(error)) from None
    except RecipeError as error:
        raise CheckpointError(f"{checkpoint / RECIPE}: not of this version of lmlong.\n{error}") from error


def read_tokenizer(checkpoint: Path, verify: bool = True) -> Tokenizer:
    """Return the tokenizer that the weights were trained with, verified."""
    if verify:
        manifest.verify(checkpoint, [TOKENIZER])
    try:
        return load_tokenizer(checkpoint / TOKENIZER)
    except UsageError as error:
        raise CheckpointError(f"{error} Use another checkpoint.") from error


def read_weights(checkpoint: Path) -> dict[str, Tensor]:
    """Return the weights, verified, on the CPU."""
    manifest.verify(checkpoint, [WEIGHTS])
    with _opening(checkpoint / WEIGHTS):
        weights = load_file(checkpoint / WEIGHTS)
    return {name: _finite(checkpoint, name, tensor) for name, tensor in weights.items()}


def _finite(checkpoint: Path, name: str, tensor: Tensor) -> Tensor:
    """Return a weight; refuse it unless its numbers are finite."""
    if tensor.dtype not in REAL or not is_finite(tensor):
        raise CheckpointError(
            f"{checkpoint / WEIGHTS}: {name} contains values that are not finite. Use another checkpoint."
        )
    return tensor


@contextmanager
def _opening(weights: Path) -> Iterator[None]:
    """Raise a CheckpointError if safetensors cannot open a file of weights.

    safetensors opens a file twice; if it is removed in between, torch raises a RuntimeError.
    """
    try:
        yield
    except SafetensorError as error:
        raise CheckpointError(f"{weights}: {error}. Use another checkpoint.") from error
    except RuntimeError as error:
        if weights.exists():
            raise
        raise CheckpointError(f"{weights}: removed while it was read. Use another checkpoint.") from error


def read_training(checkpoint: Path, mapped: Container[str] = ()) -> dict[str, Any]:
    """Return the training state of a verified checkpoint: the values by their names, and the tensors by theirs.

    The tensors named in `mapped` stay in the file, and take memory only from when they are read until `unload`.
    """
    values, tensors = checkpoint / TRAINING_VALUES, checkpoint / TRAINING_TENSORS
    try:
        if values.stat().st_size > MAX_SIZE:
            raise ValueError("too large")
        state = parse_json(values.read_bytes())
        if not isinstance(state, dict):
            raise ValueError("not a JSON object")
    except ValueError as error:
        raise CheckpointError(f"{values}: {error}. Use another checkpoint.") from error
    with _opening(tensors), safe_open(tensors, "pt") as file:
        for name in file.keys():  # noqa: SIM118
            if name in state or file.get_slice(name).get_dtype() not in NAMES.values():
                raise CheckpointError(f"{tensors}: {name[:50]!r} is not of a training state. Use another checkpoint.")
            state[name] = file.get_tensor(name)
            if name not in mapped:
                state[name], in_file = state[name].clone(), state[name]
                unload(in_file)
    return state


def unload(mapped: Tensor) -> None:
    """Free the memory of a tensor that is mapped from a file; it is read again when it is used."""
    begin, end = mapped.data_ptr(), mapped.data_ptr() + mapped.nbytes
    begin, end = -(-begin // PAGESIZE) * PAGESIZE, end // PAGESIZE * PAGESIZE
    if begin < end:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), MADV_DONTNEED)


def load_weights(
    model: nn.Module,
    checkpoint: Path,
    new_attention: bool = False,
    verify: bool = True,
    loaded: Callable[[str], None] = lambda name: None,
) -> set[str]:
    """Load the weights of a checkpoint into a model of the same shape, one at a time; return the names of weights that
    keep the model's values. Only compare the shapes if the model is on the meta device. `loaded` is called with the
    name of each weight.

    With `new_attention`, weights specific to one kind of attention may be missing, and keep the model's values, or be
    unexpected, and are ignored; queries, keys and values mean the same to every kind. A missing convolution starts as
    the identity. Missing head gains, tables of n-grams and added n-gram heads keep the model's values. So does an
    output layer of labels, unless the checkpoint has one for as many.
    """
    if verify:
        manifest.verify(checkpoint, [WEIGHTS])
    own, identities = model.state_dict(keep_vars=True), _identities(model) if new_attention else {}
    with _opening(checkpoint / WEIGHTS), safe_open(checkpoint / WEIGHTS, "pt") as file:
        saved = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        if new_attention:
            saved = {name: shape for name, shape in saved.items() if name in own or not _of_attention(name)}
        missing = own.keys() - saved.keys()
        kept = {name for name in missing if name.startswith(LATER)}
        kept |= {name for name in missing if new_attention and _may_be_missing(name, identities)}
        if new_attention and getattr(model, "labels", None) and saved.get(HEAD) != tuple(own[HEAD].shape):
            saved.pop(HEAD, None)
            kept.add(HEAD)
        _compare(checkpoint, saved, {name: shape for name, shape in _shapes(own).items() if name not in kept})
        if any(tensor.is_meta for tensor in own.values()):
            return set()
        with torch.no_grad():
            for name in saved:
                own.pop(name).copy_(_finite(checkpoint, name, file.get_tensor(name)))
                loaded(name)
            for name in kept & identities.keys():
                own[name].copy_(identities[name].identity())
    return kept - identities.keys()


def read_model(checkpoint: Path, weights: Weights = "32") -> tuple[Recipe, Tokenizer, TextModel]:
    """Return the recipe, the tokenizer and the trained model, all verified. Matrices are stored in the format `weights`
    as soon as they are read, so that a model takes no more memory than it has then."""
    recipe, tokenizer = read_recipe(checkpoint), read_tokenizer(checkpoint)
    check_size(checkpoint, recipe, tokenizer)
    with Undrawn():
        model = build(recipe, tokenizer.vocabulary)
    loaded = partial(quantize_matrix, model, weights) if weights != "32" else lambda name: None
    load_weights(model, checkpoint, verify=False, loaded=loaded)  # `check_size` has verified them
    if weights != "32":
        quantize(model, weights)
    return recipe, tokenizer, model


def check_size(checkpoint: Path, recipe: Recipe, tokenizer: Tokenizer) -> None:
    """Refuse a checkpoint whose recipe and weights do not match, before the model takes any memory."""
    manifest.verify(checkpoint, [WEIGHTS])
    with _opening(checkpoint / WEIGHTS), safe_open(checkpoint / WEIGHTS, "pt") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        shapes = {name: tuple(slice.get_shape()) for name, slice in slices.items()}
        invalid = [name for name, slice in slices.items() if slice.get_dtype() not in NUMBERS]
    if invalid:
        raise CheckpointError(
            f"{checkpoint / WEIGHTS}: {invalid[0]} does not contain floating-point numbers. Use another checkpoint."
        )
    if recipe.model.layers > len(shapes):
        raise CheckpointError(f"{checkpoint / RECIPE}: has more layers than the weights. Use another checkpoint.")
    with without_memory():
        own = _shapes(build(recipe, tokenizer.vocabulary).state_dict())
    _compare(checkpoint, shapes, {name: own[name] for name in own if name in shapes or not name.startswith(LATER)})


def _shapes(weights: dict[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in weights.items()}


def _compare(checkpoint: Path, saved: dict[str, tuple[int, ...]], own: dict[str, tuple[int, ...]]) -> None:
    """Refuse weights whose shapes differ from the model's, naming the first difference."""
    for name in [*own, *(saved.keys() - own.keys())]:
        if own.get(name) != saved.get(name):
            in_file = f"has shape {saved[name]}" if name in saved else "is missing"
            in_model = f"has {own[name]}" if name in own else "does not have it"
            raise CheckpointError(
                f"{checkpoint / WEIGHTS}: {name} {in_file}, but the recipe's model {in_model}. "
                "Use the recipe that the checkpoint was trained with."
            )


def _identities(model: nn.Module) -> dict[str, ShortConvolution]:
    """Return the short convolutions of a model, which begin as identities if a checkpoint has none, by the names of
    their weights."""
    modules = [(name, module) for name, module in model.named_modules() if isinstance(module, ShortConvolution)]
    return {f"{name}.weight": module for name, module in modules}


def _of_attention(name: str) -> bool:
    """Return whether a weight is specific to a kind of attention: part of its features or gates, or of added n-gram
    heads."""
    _, inside, part = name.partition(".mixer.")
    return bool(ADDED_HEADS.match(name)) or (bool(inside) and part.partition(".")[0] not in SHARED_PARTS)


def _may_be_missing(name: str, identities: Container[str]) -> bool:
    """Return whether a weight may be missing and keep the new model's value, or become an identity. New tables of
    n-grams are 0."""
    own = _of_attention(name) or name.startswith("ngram_embedding.")
    return own or name in identities or name.endswith(".mixer.head_norm.weight")
