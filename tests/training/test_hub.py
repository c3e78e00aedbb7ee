"""A run on a data set of the hub keeps the commit that it began with."""

from pathlib import Path

import pytest

from lmlong.training.run import train

from ..data.hub_server import NAME, URL, connect, forget, serving
from .conftest import Recipes


def test_a_resumed_run_reads_the_same_commit(
    tiny: Path,
    recipe_of: Recipes,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    sources = f"text.sources=[{{kind: files, paths: [{URL}/data]}}]"
    with serving() as hub:
        connect(hub.url, tmp_path / "hf", monkeypatch)
        commit = hub.repositories[NAME].commit({"data/book.txt": tiny.with_name("book.txt").read_bytes()})
        train(recipe_of(sources, "training.steps=2"), tmp_path / "run")
        pinned = f"{URL}@{commit}/data"
        assert pinned in (tmp_path / "run" / "recipe.yaml").read_text()

        hub.repositories[NAME].commit({"data/book.txt": b"another book " * 900})
        forget(monkeypatch)
        train(recipe_of(sources, "training.steps=4"), tmp_path / "run", resume="auto")
        assert pinned in (tmp_path / "run" / "recipe.yaml").read_text()
        assert "text.sources" not in capsys.readouterr().err

        train(recipe_of(sources, "training.steps=2"), tmp_path / "run", overwrite=True)
        assert pinned not in (tmp_path / "run" / "recipe.yaml").read_text()
