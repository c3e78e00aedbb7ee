"""Commands read a run while training writes checkpoints into it and removes older ones."""

import json
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import lmlong
from grids import thinned

from lmlong.checkpoint import manifest, read, write
from lmlong.inference.loading import load
from lmlong.io.folder_manifest import seal
from lmlong.recipe import Recipe
from lmlong.recipe import file as recipe_file
from lmlong.training.checkpoint_store import CheckpointStore
from lmlong.training.run import train

from .conftest import Recipes

SMALL = ("training.steps=1", "model.width=16", "model.layers=1")


@pytest.fixture(scope="module")
def run(recipe_of: Recipes, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("read") / "run"
    train(recipe_of(*SMALL), folder)
    return folder


def command(*words: object) -> str:
    finished = lmlong(*words)
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


READERS: dict[str, Callable[[Path, Path], object]] = {
    "load": lambda run, out: load(run, "cpu"),
    "info": lambda run, out: json.loads(command("info", run, "--json")),
    "export": lambda run, out: command("export", run, "--to", "hf", "--out", out),
    "score": lambda run, out: command("score", run, run / "recipe.yaml"),
    "eval": lambda run, out: command("eval", run, "--lengths", "32", "--targets", 64, "--by", "context"),
    "init_from": lambda run, out: train(recipe_from(run), out),
}


def recipe_from(run: Path) -> Recipe:
    return recipe_file.load(str(run / "recipe.yaml"), [*SMALL, f"training.init_from={run}"])


@thinned(pytest.mark.parametrize("reader", READERS), pytest.mark.parametrize("name", manifest.FILES))
def test_checkpoint_removed_after_verification(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, reader: str
) -> None:
    """It goes at the worst moment: when its file `name` is verified, and not open yet."""
    verify, removed = manifest.verify, list[Path]()

    def verify_and_remove(checkpoint: Path, names: Iterable[str] = manifest.FILES) -> None:
        verify(checkpoint, names)
        if name in names and not removed:
            removed.append(checkpoint)
            replace(checkpoint)

    monkeypatch.setattr(manifest, "verify", verify_and_remove)
    READERS[reader](run, tmp_path / "out")
    assert removed or name in (manifest.TRAINING_TENSORS, manifest.TRAINING_VALUES)


def replace(checkpoint: Path) -> None:
    """Do what a run does when it has a newer checkpoint."""
    store = CheckpointStore(checkpoint.parent)
    newer = store.path(int(checkpoint.name.removeprefix("step-")) + 1)
    shutil.copytree(checkpoint, newer)
    about = {"step": int(newer.name.removeprefix("step-")), "validation": None, "trained_tokens": None}
    (newer / manifest.NAME).unlink()
    seal(newer, manifest.FORMAT, about)
    write.remove(checkpoint)


def test_checkpoint_removed_while_searched_is_replaced(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    is_dir = Path.is_dir

    def remove_first(path: Path) -> bool:
        if path.name.startswith("step-") and not replaced:
            replaced.append(path)
            replace(path)
        return is_dir(path)

    replaced: list[Path] = []
    monkeypatch.setattr(Path, "is_dir", remove_first)
    assert read.find(run) == read.find(run) != replaced[0]


def test_weights_removed_while_opened_are_replaced(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """safetensors opens a file, and torch opens it again by its name."""
    opened, removed = torch.UntypedStorage.from_file, list[Path]()

    def remove_first(name: str, *arguments: Any, **options: Any) -> torch.UntypedStorage:
        if not removed:
            removed.append(Path(name).parent)
            replace(removed[0])
        return opened(name, *arguments, **options)

    monkeypatch.setattr(torch.UntypedStorage, "from_file", remove_first)
    assert load(run, "cpu").checkpoint != removed[0]
