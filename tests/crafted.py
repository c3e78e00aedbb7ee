"""Files from strangers, of every format that lmlong reads: changed at random, under correct digests.

A number stands for the same file on every machine. Such a file is used or refused; anything else is a bug.
"""

import io
import json
import math
import re
import shutil
import traceback
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, NamedTuple
from zipfile import ZipFile

import numpy as np
import torch
from cli import override_draws
from crafted_values import VALUES, changed, changed_bytes
from data.made_documents import KINDS, epub
from interop import import_draws
from safetensors.torch import load_file, save_file
from surprisal import crafted_scores
from torch import Tensor
from training.conftest import write_tiny

from lmlong import recipe
from lmlong.checkpoint import manifest, read
from lmlong.checkpoint.manifest import RECIPE, TOKENIZER, TRAINING_TENSORS, TRAINING_VALUES, WEIGHTS
from lmlong.data import token_dataset
from lmlong.data.data_module import CausalDataModule
from lmlong.data.document import Document
from lmlong.data.sources import open_source
from lmlong.errors import LmlongError, UsageError
from lmlong.inference.loading import load
from lmlong.io.files import with_checksum
from lmlong.io.folder_manifest import NAME, manifest_text, seal
from lmlong.recipe import file as recipe_file
from lmlong.training.run import train

TENSORS = (torch.zeros(0), torch.zeros(1), torch.tensor(2**40), torch.ones(3, 3))
DTYPES = (torch.float64, torch.float16, torch.int64, torch.int16, torch.uint8, torch.bool, torch.complex64)
OPTIONS = (
    *("training.steps=3", "training.carry_state=true", "model.attention.kind=[linear,window]"),
    *("model.attention.window=8", "text.validation.fraction=0.3"),
)


class Place(NamedTuple):
    """A recipe, the folder of which a file is changed, and a whole copy of that folder."""

    recipe: Path
    folder: Path
    whole: Path


class Format(NamedTuple):
    """A kind of file or folder."""

    prepare: Callable[[Path], Any]
    """From an empty folder to what is changed."""
    attempt: Callable[[Random, Any], tuple[str, list[str]]]
    """Change it, use it, and return what came of it, and what is wrong."""
    usual: int
    """Cases of the usual tests."""
    outcomes: set[str]
    """What comes of some of these."""


def changed_tensor(draw: Random, x: Tensor) -> Tensor:
    match draw.randrange(4):
        case 0 if x.numel():
            x = x.clone()
            edges = (math.nan, math.inf, -1e30, 1e30) if x.is_floating_point() else (-1, 2**31 - 1, -(2**31), 255)
            x.view(-1)[draw.randrange(x.numel())] = torch.tensor(draw.choice(edges)).to(x.dtype)
            return x
        case 1:
            return x.to(draw.choice(DTYPES))
        case 2:
            return x.flatten()[:-1].clone()
        case _:
            return x[None].contiguous()


def prepare_checkpoint(folder: Path) -> Place:
    """Train a run of two steps, which carries its states."""
    tiny = write_tiny(folder)
    train(recipe_file.load(tiny, [*OPTIONS, "training.steps=2"]), folder / "run")
    whole = shutil.copytree(read.find(folder / "run"), folder / "whole")
    return Place(tiny, read.find(folder / "run"), Path(whole))


def craft_checkpoint(draw: Random, checkpoint: Path) -> str:
    name = draw.choice((*("training state",) * 4, WEIGHTS, RECIPE, TOKENIZER, manifest.NAME))
    file, about = checkpoint / name, {"step": 2, "validation": None}
    if name == "training state":
        state = read.read_training(checkpoint)
        tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
        values = {name: value for name, value in state.items() if name not in tensors}
        if draw.random() < 0.5:
            (checkpoint / TRAINING_VALUES).write_text(json.dumps(changed(draw, values)))
        else:
            chosen = draw.choice(sorted(state))  # a value becomes a tensor, or a tensor another one
            tensor = changed_tensor(draw, tensors[chosen]) if chosen in tensors else draw.choice(TENSORS)
            save_file({**tensors, chosen: tensor}, checkpoint / TRAINING_TENSORS)
    elif name == WEIGHTS:
        weights = load_file(file)
        chosen = draw.choice(sorted(weights))
        save_file({**weights, chosen: changed_tensor(draw, weights[chosen])}, file)
    elif name == manifest.NAME:
        plain = [value for value in VALUES if value is None or isinstance(value, int | float | str)]
        about = {key: draw.choice([value, *plain]) for key, value in about.items()}
    else:
        file.write_bytes(changed_bytes(draw, file.read_bytes()))
    (checkpoint / manifest.NAME).write_text(manifest_text(checkpoint, manifest.FORMAT, about))
    return name


def resume(place: Place) -> None:
    new = place.whole.with_name("new")
    shutil.rmtree(new, ignore_errors=True)
    train(recipe_file.load(place.recipe, [*OPTIONS]), new, resume=str(place.folder))


def prepare_tokens(folder: Path) -> Place:
    """Make the token files of a small text in the cache."""
    tiny = write_tiny(folder)
    cached = token_dataset.prepare(recipe_file.load(tiny, [*OPTIONS]).text).folder
    return Place(tiny, cached, Path(shutil.copytree(cached, folder / "whole")))


NUMBERS = {".tokens": "<u2", ".starts": "<i8"}
EDGES = (0, 1, -1, 257, 258, 65_535, 2**31, 2**62, -(2**62))


def craft_tokens(draw: Random, folder: Path) -> str:
    file = folder / draw.choice(sorted(path.name for path in folder.iterdir() if path.name != NAME))
    if file.suffix in NUMBERS:
        numbers = np.frombuffer(file.read_bytes(), NUMBERS[file.suffix]).copy()
        match draw.randrange(4):
            case 0:
                numbers[draw.randrange(len(numbers))] = np.array(draw.choice(EDGES)).astype(numbers.dtype)
            case 1:
                numbers = numbers[: draw.randrange(len(numbers) + 1)]
            case 2:
                numbers = numbers[::-1]
            case _:
                numbers = np.concatenate([numbers, numbers])
        file.write_bytes(numbers.tobytes()[: draw.choice((None, None, -1))])
    elif file.suffix == ".json":
        content = json.loads(file.read_text())
        content = changed(draw, content) if draw.random() < 0.5 else [content]
        file.write_text(with_checksum(content) if isinstance(content, dict) else json.dumps(content))
    else:
        file.write_bytes(draw.choice((b"", b"x", file.read_bytes()[:-1], b"\0" * 100)))
    (folder / NAME).unlink()
    seal(folder, token_dataset.FORMAT, {})
    return file.name


def read_batches(place: Place) -> None:
    loaded = recipe_file.load(place.recipe, [*OPTIONS])
    data = CausalDataModule(loaded, token_dataset.prepare(loaded.text))
    for batch in range(3):
        data.training().batch(batch)
    list(data.validation())


def use_crafted(
    craft: Callable[[Random, Path], str], uses: tuple[Callable[[Place], object], ...], draw: Random, place: Place
) -> tuple[str, list[str]]:
    """Change one file of a folder, make its manifest anew, and use the folder in several ways."""
    shutil.rmtree(place.folder, ignore_errors=True)
    shutil.copytree(place.whole, place.folder)
    name, ends, complaints = craft(draw, place.folder), [], []
    for use in uses:
        try:
            use(place)
            ends.append("used")
        except LmlongError:
            ends.append("refused")
        except Exception:
            complaints.append(f"{name}: {traceback.format_exc()}")
    return " and ".join(ends), complaints


MARKS = [f"[{number}]" for number in range(8)]
WITHIN_TEXT = r"(?:<[^>]*>|&[^;]*;|\0)*"
"""What HTML may have between two characters of a text."""
MARKUP = (
    *(b"<p>", b"</p>", b"<svg>", b"<object/>", b"<table><tr><td>", b"<w:tbl><w:tr><w:tc>", b"</w:p>", b"<!--", b"<"),
    *(b"<a x='", b"&lt;", b"&a;", b"&#x110000;", b"<![CDATA[", b"\0", b"\xff\xfe", b"<meta charset=utf-16>", b"../"),
    *(b'<!DOCTYPE x [<!ENTITY a "ha">]>', b"<mc:Fallback>", b"<itemref idref='a'/>", b"%2e%2e/", b"<" * 300),
)


def prepare_documents(folder: Path) -> dict[Path, bytes]:
    """A file of each kind, of which those of markup hold each mark once."""
    page = "".join(f"<p>{mark}<td>{mark}x" for mark in MARKS[:4]).encode()
    documents = {kind: make() for kind, make in KINDS.items()} | {"html": page, "epub": epub(page)}
    return {folder / f"crafted.{kind}": data for kind, data in documents.items()}


def changed_member(draw: Random, archive: bytes) -> bytes:
    """Change one member of a ZIP archive, whose checksum is right again."""
    with ZipFile(io.BytesIO(archive)) as zipped:
        members = {name: zipped.read(name) for name in zipped.namelist()}
    chosen, file = draw.choice(sorted(members)), io.BytesIO()
    members[chosen] = changed_bytes(draw, members[chosen], MARKUP)
    with ZipFile(file, "w") as zipped:
        for name, data in members.items():
            zipped.writestr(
                changed_bytes(draw, name.encode()).decode("latin-1") if draw.random() < 0.05 else name, data
            )
    return file.getvalue()


def try_document(draw: Random, documents: dict[Path, bytes]) -> tuple[str, list[str]]:
    """It is read, with no text that is not there, or left out with a reason."""
    file = draw.choice(sorted(documents))
    is_zip = file.suffix in (".docx", ".epub", ".zip")
    data = documents[file]
    data = changed_member(draw, data) if is_zip and draw.random() < 0.7 else changed_bytes(draw, data, MARKUP)
    file.write_bytes(data)
    texts, reasons = [], []
    try:
        for found in open_source(recipe.Files(kind="files", paths=[str(file)]), "replace").documents():
            if isinstance(found, Document):
                texts.append("".join(found.pieces()))
                found.measure()
            else:
                reasons.append(found.reason)
    except UsageError as error:
        return "refused", [] if file.name in str(error) else [str(error)]
    complaints = [reason for reason in reasons if not reason.strip() or "Traceback" in reason]
    if file.suffix == ".html":
        text, written = "".join(texts), data.decode("latin-1")
        for mark in MARKS:
            pattern = WITHIN_TEXT.join(map(re.escape, mark))
            complaints += [f"{mark} too often"] * (text.count(mark) > len(re.findall(pattern, written)))
    return "read" if texts else "left out", complaints


FORMATS = {
    "checkpoints": Format(
        prepare_checkpoint,
        partial(use_crafted, craft_checkpoint, (lambda place: load(place.folder, "cpu"), resume)),
        usual=15,
        outcomes={"refused and refused", "used and refused"},
    ),
    "tokens": Format(prepare_tokens, partial(use_crafted, craft_tokens, (read_batches,)), usual=20, outcomes={"used"}),
    "documents": Format(prepare_documents, try_document, usual=150, outcomes={"read", "left out", "refused"}),
    "overrides": Format(override_draws.prepare, override_draws.try_command, 60, {"exit code 0", "exit code 2"}),
    "scores": Format(crafted_scores.prepare, crafted_scores.try_score, usual=25, outcomes={"refused", "scored"}),
    "imports": Format(
        lambda folder: folder / "drawn",
        import_draws.try_import,
        usual=60,
        outcomes={f"{kind} {outcome}" for kind in ("folder", "gguf") for outcome in ("imported", "refused")},
    ),
}


def try_crafted(number: int, form: Format, prepared: Any) -> tuple[str, list[str]]:
    """Use what a number stands for; return what came of it, and what is wrong."""
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            return form.attempt(Random(number), prepared)
    except BaseException as error:  # a panic of a library in Rust is no Exception
        if isinstance(error, KeyboardInterrupt):
            raise
        return "crashed", [traceback.format_exc()]
