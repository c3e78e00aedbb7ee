"""Checkpoints: written whole or not at all, and read only when every byte is what was saved."""

import shutil
from pathlib import Path

import pytest
import torch

from lmlong.checkpoint import manifest, read, write
from lmlong.errors import CheckpointError

from .conftest import RECIPE, model


def test_checkpoint_is_read_back(checkpoint: Path) -> None:
    weights, expected = read.read_weights(checkpoint), model().state_dict()
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    training = read.read_training(checkpoint)
    assert training["step"] == 7
    assert training["optimizer.0.momentum"].tolist() == [0, 1, 2, 3, 4]
    assert read.read_recipe(checkpoint) == RECIPE
    assert sorted(path.name for path in checkpoint.iterdir()) == [
        "manifest.json", "model.safetensors", "recipe.yaml", "tokenizer.model", "training.json", "training.safetensors",
    ]  # fmt: skip


def test_checkpoint_is_found_by_name_and_path(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = checkpoint.parent.parent
    assert read.find(run) == read.find(checkpoint) == read.find(checkpoint.parent / "latest") == checkpoint.resolve()
    (run.parent / "runs").mkdir()
    run.rename(run.parent / "runs" / "mine")
    monkeypatch.chdir(run.parent)
    for name in ("mine", "mine/checkpoints/latest", "runs/mine/checkpoints/best"):
        assert read.find(name) == (run.parent / "runs/mine/checkpoints/step-00000007").resolve()
    with pytest.raises(CheckpointError, match=r"mien: no such run or checkpoint\. Did you mean 'mine'\?"):
        read.find("mien")
    for name in "bcdef":
        Path("runs", name, "checkpoints").mkdir(parents=True)
    for missing in ("xyz", "runs/xyz"):
        with pytest.raises(CheckpointError, match=r"no such run or checkpoint\. runs has b, c, d, e, f and 1 more\.$"):
            read.find(missing)
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        read.find(run.parent)


def test_foreign_model_is_to_be_imported_first(tmp_path: Path) -> None:
    (tmp_path / "small.Q4.gguf").write_bytes(b"GGUF")
    (tmp_path / "Tiny Llama").mkdir()
    (tmp_path / "Tiny Llama" / "config.json").write_text("{}")
    for name, run in (("small.Q4.gguf", "runs/small.Q4"), ("Tiny Llama", "'runs/Tiny Llama'")):
        with pytest.raises(CheckpointError, match=rf"Import it first: lmlong import \S*.*{name}'? --out {run}, then"):
            read.find(tmp_path / name)
    (tmp_path / "Tiny Llama" / "modeling_lmlong.py").write_text("")
    with pytest.raises(CheckpointError, match="an export for other programs"):
        read.find(tmp_path / "Tiny Llama")


def test_missing_file_is_named(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").unlink()
    for run in (checkpoint, checkpoint.parents[1]):  # waits for no newer checkpoint
        with pytest.raises(CheckpointError, match=r"model\.safetensors: missing"):
            read.reading(run, read.read_weights)


def test_weights_of_another_shape_are_named(checkpoint: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"embedding\.weight has shape \(258, 16\), but the recipe's model has \(258, 32\)"
    ):
        read.load_weights(model(width=32), checkpoint)
    with pytest.raises(CheckpointError, match=r"blocks\.1\..* is missing"):
        read.load_weights(model(layers=2), checkpoint)


@pytest.mark.parametrize("what", ["file", "link", "dangling link", "copy of another step"])
def test_file_in_the_way_is_moved(checkpoint: Path, what: str) -> None:
    place = checkpoint.with_name("step-00000008")
    if what == "file":
        place.write_text("mine")
    elif what == "copy of another step":
        shutil.copytree(checkpoint, place)
    else:
        place.symlink_to(checkpoint.name if what == "link" else "nowhere")
    write.write(place, write.Contents(model().state_dict(), {}, "", b"", 8))
    moved = checkpoint.with_name("step-00000008-moved-1")
    assert moved.is_symlink() or moved.exists()
    manifest.verify(place)


def test_damaged_checkpoint_is_replaced(checkpoint: Path) -> None:
    (checkpoint / manifest.NAME).write_text("{")
    write.write(checkpoint, write.Contents(model().state_dict(), {}, "", b"", 7))
    manifest.verify(checkpoint)
    assert [path.name for path in checkpoint.parent.glob("step-*")] == [checkpoint.name]
