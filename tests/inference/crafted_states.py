"""State files that anybody may have made: tensors changed at random, under a digest that is right.

A number stands for the same file on every machine. Such a file is either refused with a CheckpointError or usable; the
quality of its text does not matter. It never causes another exception, or an access outside a tensor.
"""

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from random import Random
from typing import NamedTuple

import torch
from crafted_values import write_state
from inference.conftest import prose, write_run
from safetensors.torch import load_file
from torch import Tensor

from lmlong.data.tokenizers.base import ByteTokenizer
from lmlong.errors import LmlongError
from lmlong.inference import sparse, state_file
from lmlong.inference.loading import StateDtype, TrainedLanguageModel, load
from lmlong.model.state import named_tensors
from lmlong.recipe import Attention, Downsample, Model, Ngram

SMALL = partial(Model, width=16, heads=2, layers=2)
MODELS: dict[str, Model] = {
    "ngram": SMALL(attention=Attention(kind=["linear", "ngram"], ngram=Ngram(buckets=64))),
    "added": SMALL(add_ngram=[2], attention=Attention(kind="linear", ngram=Ngram(buckets=64))),
    "softmax": SMALL(kv_heads=1, attention=Attention(kind="softmax")),
    "softmax in float32": SMALL(kv_heads=1, attention=Attention(kind="softmax")),
    "window": SMALL(attention=Attention(kind=["linear", "window"], window=8)),
    "window of one": SMALL(attention=Attention(kind=["window", "linear"], window=1)),
    "parallel": SMALL(attention=Attention(kind="delta", parallel_window=8)),
    "hourglass": SMALL(layers=3, downsample=Downsample(factor=4), attention=Attention(kind="softmax")),
    "float64": SMALL(attention=Attention(kind="linear")),
    "learned": SMALL(attention=Attention(kind="linear")),
}

STATES: dict[str, StateDtype] = {"float64": "64", "softmax in float32": "32"}
"""The formats of states, if they are not the default."""

EXTREMES = (-(2**63), -(2**62), -(2**31), -258, -2, -1, 0, 1, 255, 256, 257, 258, 2**31 - 1, 2**61, 2**62, 2**63 - 1)
FLOAT_TYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
DTYPES = (*FLOAT_TYPES, torch.int64, torch.int32, torch.uint8, torch.bool)
FLOATS = (float("nan"), float("inf"), -float("inf"), 3e38, -3e38, 1e-45, 0.0, 1e300)


class Case(NamedTuple):
    """A model and a state file of it."""

    model: TrainedLanguageModel
    tensors: dict[str, Tensor]
    about: dict


def prepare(folder: Path, kinds: Iterable[str] = MODELS) -> dict[str, Case]:
    """Write a model of each kind with random weights, and a state of each."""
    cases = {}
    for name in kinds:
        run = write_run(folder / name, ByteTokenizer(), "bytes", 0.3, MODELS[name])
        learn = name == "learned"
        model = load(run, "cpu", state_dtype=STATES.get(name, "auto"), learn=learn)
        model.use_fast_engine(None)
        saved = folder / f"{name}.state"
        model.save_state(model.read(prose(60)), saved)
        cases[name] = Case(model, load_file(saved), state_file.describe(saved))
    return cases


def any_integer(draw: Random, x: Tensor) -> Tensor:
    """Put an integer of the edges into one place, or into many."""
    if x.is_floating_point() or not x.numel():
        return x
    value = draw.choice((*EXTREMES, draw.randrange(-(2**63), 2**63)))
    limits = (0, 1) if x.dtype == torch.bool else (torch.iinfo(x.dtype).min, torch.iinfo(x.dtype).max)
    return _put(draw, x, min(max(value, limits[0]), limits[1]))


def any_float(draw: Random, x: Tensor) -> Tensor:
    return _put(draw, x, draw.choice(FLOATS)) if x.is_floating_point() and x.numel() else x


def _put(draw: Random, x: Tensor, value: float) -> Tensor:
    """Put a value into one place, or into all."""
    x = x.clone()
    into = slice(None) if draw.random() < 0.3 else draw.randrange(x.numel())
    x.view(-1)[into] = torch.tensor(value).to(x.dtype) if x.is_floating_point() else value
    return x


def any_size(draw: Random, x: Tensor) -> Tensor:
    """Make one dimension shorter or longer, by copies of what it has or by zeros."""
    if not x.ndim:
        return x[None]
    dim = draw.randrange(x.ndim)
    size = max(0, x.shape[dim] + draw.choice((-1, 1, -x.shape[dim], x.shape[dim], 300)))
    longer = torch.zeros(*x.shape[:dim], size, *x.shape[dim + 1 :], dtype=x.dtype)
    shared = min(size, x.shape[dim])
    longer.narrow(dim, 0, shared).copy_(x.narrow(dim, 0, shared))
    return longer


def any_dtype(draw: Random, x: Tensor) -> Tensor:
    return x.to(draw.choice(DTYPES))


def any_form(draw: Random, x: Tensor) -> Tensor:
    return draw.choice((x[None], x.flatten(), x.mT.contiguous() if x.ndim > 1 else x))


def any_bytes(draw: Random, x: Tensor) -> Tensor:
    """Draw the bytes anew, of bools too, which have two values."""
    if not x.numel():
        return x
    x = x.clone()
    x.view(-1).view(torch.uint8).copy_(
        torch.tensor(list(draw.randbytes(x.numel() * x.element_size())), dtype=torch.uint8)
    )
    return x


CHANGES: tuple[Callable[[Random, Tensor], Tensor], ...] = (
    *(any_integer, any_integer, any_integer, any_float, any_size, any_size, any_dtype, any_form, any_bytes),
)


def craft(draw: Random, case: Case, file: Path) -> str:
    """Write a file of changed tensors, and return what was changed."""
    tensors, changed = dict(case.tensors), []
    whole = dict(named_tensors(state_file._empty(case.model.model, state_file._learns(case.tensors))))
    if draw.random() < 0.5:  # else a table is changed in its packed form
        tensors = sparse.unpack(tensors, whole)
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        change, name = draw.choice(CHANGES), draw.choice(sorted(tensors))
        if draw.random() < 0.3:  # several that must agree
            stem = name.rpartition(".")[0]
            for other in [each for each in tensors if each.startswith(f"{stem}.")]:
                tensors[other] = change(draw, tensors[other])
        tensors[name] = change(draw, tensors[name])
        changed.append(f"{change.__name__} {name}")
    if draw.random() < 0.05:
        del tensors[draw.choice(sorted(tensors))]
    write_state(file, case.about, {name: x.contiguous() for name, x in tensors.items()})
    return ", ".join(changed)


def try_crafted(number: int, cases: dict[str, Case], file: Path) -> tuple[str, list[str]]:
    """Go on from the file of a number by torch or native code, and return what came of it and what is wrong."""
    draw = Random(number)
    name = draw.choice(sorted(cases))
    changed = craft(draw, cases[name], file)
    model = cases[name].model
    try:
        session = model.load_state(file)
    except LmlongError as error:
        told = str(error)
        return "refused", [] if str(file) in told and len(told) < 500 else [f"{name}: {changed}: {told[:1000]}"]
    try:
        "".join(model.stream("and so", state=session, max_tokens=6, repetition_penalty=1.2, seed=number))
        model.save_state(model.read("on", session), file)
    except LmlongError as error:
        return "told", [] if "not finite" in str(error) else [f"{name}: {changed}: {error}"]
    return "text", []
