"""Checkpoints from strangers: damaged ones are found, crafted ones are refused, and nothing in them is ever run."""

import random
from pathlib import Path

import pytest
import torch
from commands import lmlong
from machine import new_cache
from safetensors.torch import save_file

from lmlong.checkpoint import manifest, read, write
from lmlong.errors import CheckpointError
from lmlong.inference.loading import load
from lmlong.io.folder_manifest import MAX_SIZE
from lmlong.recipe import file as recipe_file

from .conftest import RECIPE, sign

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


@pytest.mark.parametrize(
    ("here", "there", "why"),
    [
        ("\n  width: 16\n", "\n  width: 131072\n", "the recipe's model has"),
        ("layers: 1\n", "layers: 10000\n", "has more layers than the weights"),
        ("layers: 1\n", "layers: 1000000000\n", "at most 10000"),
    ],
)
def test_recipe_of_a_larger_model_is_refused(checkpoint: Path, here: str, there: str, why: str) -> None:
    recipe = (checkpoint / write.RECIPE).read_text()
    assert here in recipe
    (checkpoint / write.RECIPE).write_text(recipe.replace(here, there))
    sign(checkpoint)
    with pytest.raises(CheckpointError, match=why):
        load(checkpoint, "cpu")


def test_weights_that_are_not_safetensors_are_refused(checkpoint: Path) -> None:
    for header in (b"\xff" * 8, (10**12).to_bytes(8, "little"), b""):
        (checkpoint / write.WEIGHTS).write_bytes(header + b"{}")
        sign(checkpoint)
        with pytest.raises(CheckpointError, match=r"model\.safetensors"):
            load(checkpoint, "cpu")


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b"[" * 200_000, b'{"step": ' + b"9" * 5000 + b"}", b'{"step": ', b" " * (MAX_SIZE + 1), b"\xff"],
)
def test_values_that_are_not_a_json_object_are_refused(checkpoint: Path, content: bytes) -> None:
    (checkpoint / manifest.TRAINING_VALUES).write_bytes(content)
    sign(checkpoint)
    with pytest.raises(CheckpointError, match=r"training\.json: .* Use another checkpoint\.$"):
        read.read_training(checkpoint)


def test_impossible_training_tensors_are_refused(checkpoint: Path) -> None:
    path = checkpoint / manifest.TRAINING_TENSORS
    for tensors in ({"a": torch.zeros(2, dtype=torch.int8)}, {"step": torch.ones(1)}, None):
        path.write_bytes((1 << 40).to_bytes(8, "little")) if tensors is None else save_file(tensors, path)
        sign(checkpoint)
        with pytest.raises(CheckpointError, match=r"training\.safetensors: .* Use another checkpoint\.$"):
            read.read_training(checkpoint)


def test_large_manifest_is_not_read(checkpoint: Path) -> None:
    (checkpoint / manifest.NAME).write_bytes(b"[" * (MAX_SIZE + 1))
    with pytest.raises(CheckpointError, match="too large for a manifest"):
        manifest.verify(checkpoint)


def test_exchanged_tokenizer_is_refused(checkpoint: Path) -> None:
    (checkpoint / write.TOKENIZER).write_bytes(b"another")
    with pytest.raises(CheckpointError, match=r"tokenizer\.model: not what was saved"):
        load(checkpoint, "cpu")


class Payload:
    """Creates a file when it is unpickled."""

    def __init__(self, witness: Path):
        self.witness = witness

    def __reduce__(self) -> tuple:
        return (Path.touch, (self.witness,))


COMMANDS = {
    "resume": ["train", "RECIPE", "--resume", "CHECKPOINT", "--out", "RUN"],
    "generate": ["generate", "CHECKPOINT", "--prompt", "a"],
}
BOTH = [write.WEIGHTS, write.TRAINING_TENSORS]


@pytest.mark.parametrize(
    ("name", "where"), [*((name, BOTH) for name in COMMANDS), ("resume", [write.TRAINING_TENSORS])]
)
def test_no_command_runs_pickled_code(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, where: list[str]
) -> None:
    monkeypatch.setenv("LMLONG_CACHE", str(new_cache(tmp_path)))
    witness, book, recipe = tmp_path / "witness", tmp_path / "book.txt", tmp_path / "run.yaml"
    book.write_text("words and more words " * 300)
    recipe.write_text(
        f"text: {{sources: [{{kind: files, paths: [{book}]}}], tokenizer: {{kind: bytes}}, sequence_length: 64}}\n"
        'model: {width: 16, layers: 1, heads: 2}\ntraining: {steps: 1, precision: "32"}\n'
    )
    (checkpoint / write.RECIPE).write_text(recipe_file.dump(recipe_file.load(str(recipe))))
    for file in where:
        torch.save({"global_step": Payload(witness), "state_dict": Payload(witness)}, checkpoint / file)
    sign(checkpoint)

    named = {"CHECKPOINT": checkpoint, "RECIPE": recipe, "RUN": tmp_path / "new"}
    done = lmlong(*(named.get(word, word) for word in COMMANDS[name]))
    assert not witness.exists()
    assert done.returncode == 4, done.stderr
    assert where[0] in done.stderr and "Traceback" not in done.stderr


def test_payload_works_when_unpickled(tmp_path: Path) -> None:
    torch.save(Payload(tmp_path / "witness"), tmp_path / "payload.pt")
    torch.load(tmp_path / "payload.pt", weights_only=False)
    assert (tmp_path / "witness").exists()


def test_additional_weights_are_refused(checkpoint: Path) -> None:
    weights = read.read_weights(checkpoint)
    save_file({**weights, "blocks.0.mixer.extra": torch.zeros(3)}, checkpoint / write.WEIGHTS)
    sign(checkpoint)
    with pytest.raises(
        CheckpointError, match=r"blocks\.0\.mixer\.extra has shape \(3,\), but the recipe's model does not have it"
    ):
        load(checkpoint, "cpu")
    assert RECIPE.model.layers == 1
