"""A recipe file, and the mistakes that are found in it."""

from collections.abc import Callable
from pathlib import Path

import pytest

from lmlong.errors import RecipeError
from lmlong.recipe import Recipe
from lmlong.recipe.file import load

Complaints = Callable[..., list[str]]
Loaded = Callable[..., Recipe]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "books.yaml"


@pytest.fixture
def loaded(file: Path) -> Loaded:
    """The recipe of a text, with overrides."""

    def recipe(text: str, *overrides: str) -> Recipe:
        file.write_text(text)
        return load(str(file), overrides)

    return recipe


@pytest.fixture
def complaints(file: Path) -> Complaints:
    """The mistakes found in a recipe with overrides, without the name of its file."""

    def found(text: str | bytes, *overrides: str) -> list[str]:
        file.write_bytes(text.encode() if isinstance(text, str) else text)
        with pytest.raises(RecipeError) as caught:
            load(str(file), overrides)
        return [mistake.replace(str(file), "file") for mistake in caught.value.mistakes]

    return found
