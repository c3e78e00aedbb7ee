"""Token files that anybody may have made: numbers changed at random, under a manifest that is right.

A number stands for the same change on every machine. Training reads such files, or those that replace them.
"""

import json
import shutil
import traceback
from pathlib import Path
from random import Random
from typing import NamedTuple

import numpy as np

from lmlong import recipe
from lmlong.data.data_module import CausalDataModule
from lmlong.data.token_dataset import FORMAT, prepare
from lmlong.errors import LmlongError
from lmlong.io.files import with_checksum
from lmlong.io.folder_manifest import NAME, seal

TYPES = {".tokens": "<u2", ".starts": "<i8"}
EDGES = (0, 1, -1, 257, 258, 65_535, 2**31, 2**62, -(2**62))
VALUES = (None, True, -1, 0, 1, 2**63, 10**30, 1.5, "", "x", [], {}, [0])


class Place(NamedTuple):
    made: recipe.Recipe
    folder: Path
    whole: Path  # a copy of what was made


def prepare_place(folder: Path) -> Place:
    """Make the token files of a small text in the cache."""
    for number in range(3):
        (folder / f"{number}.txt").write_text(f"document {number} " * 20)
    made = recipe.Recipe.model_validate(
        {
            "text": {
                "sources": [{"kind": "files", "paths": [str(folder / "*.txt")]}],
                "validation": {"fraction": 0.3},
                "tokenizer": {"kind": "bytes"},
                "sequence_length": 16,
            },
            "training": {"steps": 2, "batch_size": 2},
        }
    )
    cached = prepare(made.text).folder
    shutil.copytree(cached, folder / "whole")
    return Place(made, cached, folder / "whole")


def craft(draw: Random, place: Place) -> str:
    """Change one file of the folder, and make its manifest anew."""
    shutil.rmtree(place.folder)
    shutil.copytree(place.whole, place.folder)
    names = sorted(path.name for path in place.folder.iterdir() if path.name != NAME and path.is_file())
    file = place.folder / draw.choice(names)
    if file.suffix in TYPES:
        numbers = np.frombuffer(file.read_bytes(), TYPES[file.suffix]).copy()
        match draw.randrange(4):
            case 0 if len(numbers):
                numbers[draw.randrange(len(numbers))] = np.array(draw.choice(EDGES)).astype(numbers.dtype)
            case 1:
                numbers = numbers[: draw.randrange(len(numbers) + 1)]
            case 2:
                numbers = numbers[::-1]
            case _:
                numbers = np.concatenate([numbers, numbers])
        data = numbers.tobytes()[: draw.choice((None, None, -1))]
    elif file.suffix == ".json":
        content = json.loads(file.read_text())
        content.pop("sha256", None)
        key = draw.choice(sorted(content)) if content else "x"
        content[key] = draw.choice(VALUES)
        data = with_checksum(content).encode()
    else:
        data = draw.choice((b"", b"x", file.read_bytes()[:-1], b"\0" * 100))
    file.write_bytes(data)
    (place.folder / NAME).unlink()
    seal(place.folder, FORMAT, {})
    return file.name


def try_tokens(number: int, place: Place) -> tuple[str, list[str]]:
    """Read batches of the token files of a number; return what came of it and what is wrong."""
    name = craft(Random(number), place)
    try:
        data = CausalDataModule(place.made, prepare(place.made.text))
        for batch in range(3):
            data.training().batch(batch)
        list(data.validation())
    except LmlongError:
        return "refused", []
    except Exception:
        return "crashed", [f"{name}: {traceback.format_exc()}"]
    return "read", []
