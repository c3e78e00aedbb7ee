"""environment.json: the text a run was trained on, the packages and the machine."""

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from lmlong.data.token_file import Count
from lmlong.recipe import Recipe
from lmlong.recipe.find import ENVIRONMENT
from lmlong.recipe.paths import without_folders


class SourceText(BaseModel):
    """What was read from one source: to train on, and to validate by."""

    name: str = ""
    train: Count = Count()
    validation: Count = Count()


class TokenizedText(BaseModel):
    """The text of a run."""

    sources: list[SourceText] = []


class Environment(BaseModel):
    """A run's environment, as far as it is shown; what is missing in the file is empty."""

    begun: str = ""
    python: str = ""
    packages: dict[str, str] = {}
    machine: str = ""
    device: str = ""
    threads: int = 0
    text: TokenizedText = TokenizedText()


def read_environment(checkpoint: Path) -> Environment:
    """Return the environment of the run of a checkpoint; an empty one if the file is missing or damaged."""
    try:
        return Environment.model_validate_json((checkpoint.parents[1] / ENVIRONMENT).read_bytes())
    except (OSError, ValidationError):
        return Environment()


def text_sources(environment: Environment, recipe: Recipe) -> list[SourceText]:
    """Return the amounts of text by source, whose files are named without their folders."""
    text = without_folders(recipe.model_dump())["text"]
    options = [*text["sources"], *text["validation"]["sources"]]
    sources = environment.text.sources
    if len(options) != len(sources):
        return []
    return [read.model_copy(update={"name": _name(given)}) for given, read in zip(options, sources, strict=True)]


def _name(options: dict[str, Any]) -> str:
    """Return the kind of a source and what it reads."""
    return " ".join(
        [options["kind"], *options.get("paths", []), *([options["dataset"]] if "dataset" in options else [])]
    )
