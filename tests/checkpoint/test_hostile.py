"""Checkpoints from strangers: damaged ones are found, crafted ones are refused, and nothing in them is ever run."""

import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from lmlong.checkpoint import manifest, read
from lmlong.checkpoint.manifest import RECIPE, TOKENIZER, TRAINING_TENSORS, TRAINING_VALUES, WEIGHTS
from lmlong.errors import CheckpointError
from lmlong.inference.loading import load
from lmlong.io.folder_manifest import MAX_SIZE
from lmlong.recipe import file as recipe_file

from . import conftest
from .conftest import model, sign

CUTS, FLIPS = 30, 90


def test_cuts_and_changed_bits_are_found(checkpoint: Path) -> None:
    """Each draw takes a file by its size, so large files get most; the small ones get some of their own."""
    draw = random.Random(0)
    files = sorted(checkpoint.iterdir())
    sizes = [path.stat().st_size for path in files]
    for number in range(CUTS + FLIPS):
        path = files[number % len(files)] if number % 2 else draw.choices(files, sizes)[0]
        whole = path.read_bytes()
        place, bit = draw.randrange(len(whole)), 1 << draw.randrange(8)
        cut = whole[:place]
        flipped = cut + bytes([whole[place] ^ bit]) + whole[place + 1 :]
        path.write_bytes(cut if number < CUTS else flipped)
        with pytest.raises(CheckpointError):
            manifest.verify(checkpoint)
        path.write_bytes(whole)
    manifest.verify(checkpoint)


def recipe_with(here: str, there: str) -> bytes:
    text = recipe_file.dump(conftest.RECIPE)
    assert here in text
    return text.replace(here, there).encode()


def weights_with(name: str, tensor: torch.Tensor) -> bytes:
    return save({**model().state_dict(), name: tensor})


CRAFTED: list[tuple[str, str, list[bytes]]] = [
    (RECIPE, "the recipe's model has", [recipe_with("\n  width: 16\n", "\n  width: 131072\n")]),
    (RECIPE, "has more layers than the weights", [recipe_with("layers: 1\n", "layers: 10000\n")]),
    (RECIPE, "at most 10000", [recipe_with("layers: 1\n", "layers: 1000000000\n")]),
    (WEIGHTS, r"model\.safetensors", [b"\xff" * 8 + b"{}", (10**12).to_bytes(8, "little") + b"{}", b"{}"]),
    (
        *(WEIGHTS, r"blocks\.0\.mixer\.extra has shape \(3,\), but the recipe's model does not have it"),
        [weights_with("blocks.0.mixer.extra", torch.zeros(3))],
    ),
    (
        *(TRAINING_VALUES, r"training\.json: .* Use another checkpoint\.$"),
        [
            *(b"", b"[]", b"[" * 200_000, b'{"step": ', b'{"step": ' + b"9" * 5000 + b"}"),
            *(b" " * (MAX_SIZE + 1), b"\xff"),
        ],
    ),
    (
        *(TRAINING_TENSORS, r"training\.safetensors: .* Use another checkpoint\.$"),
        [
            *(save({"a": torch.zeros(2, dtype=torch.int8)}), save({"step": torch.ones(1)})),
            (1 << 40).to_bytes(8, "little"),
        ],
    ),
]


def use(checkpoint: Path, name: str) -> object:
    """Read a file as a resumed run or an inference does."""
    return read.read_training(checkpoint) if name in (TRAINING_VALUES, TRAINING_TENSORS) else load(checkpoint, "cpu")


@pytest.mark.parametrize(("name", "why", "contents"), CRAFTED, ids=range(len(CRAFTED)))
def test_crafted_file_is_refused(checkpoint: Path, name: str, why: str, contents: list[bytes]) -> None:
    for content in contents:
        (checkpoint / name).write_bytes(content)
        sign(checkpoint)
        with pytest.raises(CheckpointError, match=why):
            use(checkpoint, name)


def test_large_manifest_is_not_read(checkpoint: Path) -> None:
    (checkpoint / manifest.NAME).write_bytes(b"[" * (MAX_SIZE + 1))
    with pytest.raises(CheckpointError, match="too large for a manifest"):
        manifest.verify(checkpoint)


def test_exchanged_tokenizer_is_refused(checkpoint: Path) -> None:
    (checkpoint / TOKENIZER).write_bytes(b"another")
    with pytest.raises(CheckpointError, match=r"tokenizer\.model: not what was saved"):
        load(checkpoint, "cpu")


class Payload:
    """Creates a file when it is unpickled."""

    def __init__(self, witness: Path):
        self.witness = witness

    def __reduce__(self) -> tuple:
        return (Path.touch, (self.witness,))


@pytest.mark.parametrize("name", [WEIGHTS, TRAINING_TENSORS])
def test_pickled_code_is_not_run(checkpoint: Path, tmp_path: Path, name: str) -> None:
    witness = tmp_path / "witness"
    torch.save({"global_step": Payload(witness), "state_dict": Payload(witness)}, checkpoint / name)
    sign(checkpoint)
    with pytest.raises(CheckpointError, match=name):
        use(checkpoint, name)
    assert not witness.exists()
    with (checkpoint / name).open("rb") as file:
        torch.load(file, weights_only=False)
    assert witness.exists(), "it would have been run"
