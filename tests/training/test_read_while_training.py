"""Commands read a run while training writes checkpoints into it and removes older ones."""

import json
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from lmlong.checkpoint import manifest, read, write
from lmlong.cli.main import lmlong
from lmlong.inference.loading import load
from lmlong.io.folder_manifest import seal
from lmlong.recipe import Recipe
from lmlong.recipe import file as recipe_file
from lmlong.training.checkpoint_store import CheckpointStore
from lmlong.training.run import train

from .conftest import Recipes


@pytest.fixture(scope="module")
def run(shared: Path, shared_recipe_of: Recipes) -> Path:
    train(shared_recipe_of("training.steps=1", "model.width=16", "model.layers=1"), shared / "run")
    return shared / "run"


@contextmanager
def checkpoints_come_and_go(run: Path) -> Iterator[None]:
    """Write checkpoints as fast as the disk takes them, and keep the newest alone, as a run does."""
    newest, store, done = read.find(run), CheckpointStore(run / "checkpoints"), threading.Event()
    recipe, tokenizer = ((newest / name).read_bytes() for name in (manifest.RECIPE, manifest.TOKENIZER))
    weights, training = read.read_weights(newest), {"step": 0}
    steps = iter(range(manifest.read(newest).step + 1, 1 << 30))

    def save() -> None:
        while not done.is_set():
            step = next(steps)
            write.write(store.path(step), write.Contents(weights, training, recipe.decode(), tokenizer, step))
            store.link()
            store.prune()

    writer = threading.Thread(target=save)
    writer.start()
    try:
        yield
    finally:
        done.set()
        writer.join()


def command(*words: object) -> str:
    result = CliRunner().invoke(lmlong, [*map(str, words)], catch_exceptions=False, standalone_mode=False)
    if result.exception:
        raise result.exception
    return result.stdout


READERS: dict[str, Callable[[Path, Path], object]] = {
    "load": lambda run, out: load(run, "cpu"),
    "info": lambda run, out: json.loads(command("info", run, "--json")),
    "export": lambda run, out: command("export", run, "--to", "hf", "--out", out),
    "score": lambda run, out: command("score", run, run.parent / "tiny.yaml"),
    "eval": lambda run, out: command("eval", run, "--lengths", "32", "--targets", 64, "--by", "context"),
    "init_from": lambda run, out: train(recipe_from(run), out),
}


def recipe_from(run: Path) -> Recipe:
    overrides = ("training.steps=1", "model.width=16", "model.layers=1", f"training.init_from={run}")
    return recipe_file.load(str(run.parent / "tiny.yaml"), overrides)


@pytest.mark.parametrize("reader", READERS)
def test_a_run_is_read_while_its_checkpoints_are_replaced(run: Path, tmp_path: Path, reader: str) -> None:
    with checkpoints_come_and_go(run):
        for number in range(5):
            READERS[reader](run, tmp_path / str(number))


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("name", manifest.FILES)
def test_a_checkpoint_that_is_removed_after_it_was_verified_is_not_missed(
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
    assert removed or name == manifest.TRAINING


def replace(checkpoint: Path) -> None:
    """Do what a run does when it has a newer checkpoint."""
    store = CheckpointStore(checkpoint.parent)
    newer = store.path(int(checkpoint.name.removeprefix("step-")) + 1)
    shutil.copytree(checkpoint, newer)
    about = {"step": int(newer.name.removeprefix("step-")), "validation": None, "trained_tokens": None}
    (newer / manifest.NAME).unlink()
    seal(newer, manifest.FORMAT, about)
    write.point(store.folder / "latest", newer)
    write.point(store.folder / "best", newer)
    write.remove(checkpoint)


def test_a_link_that_moves_while_it_is_followed_is_followed_again(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    is_file = Path.is_file

    def remove_first(path: Path) -> bool:
        if path.name == manifest.NAME and path.parent.name.startswith("step-") and not replaced:
            replaced.append(path.parent)
            replace(path.parent)
        return is_file(path)

    replaced: list[Path] = []
    monkeypatch.setattr(Path, "is_file", remove_first)
    assert read.find(run) == read.find(run) != replaced[0]


def test_weights_that_are_removed_while_they_are_opened_are_not_missed(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """safetensors opens a file, and torch opens it again by its name."""
    opened, removed = torch.UntypedStorage.from_file, list[Path]()

    def remove_first(name: str, *arguments: Any, **options: Any) -> torch.UntypedStorage:
        if not removed:
            removed.append(Path(name).parent)
            replace(removed[0])
        return opened(name, *arguments, **options)

    monkeypatch.setattr(torch.UntypedStorage, "from_file", remove_first)
    assert load(run, "cpu").checkpoint != removed[0]
