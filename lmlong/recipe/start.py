"""What a recipe leaves out where it begins from the weights of another run, or learns from it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lmlong.recipe.yaml import BrokenYAML, Document, at

RECIPE = "recipe.yaml"
"""The file in a run folder or checkpoint that holds its recipe."""


def with_start(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a recipe with the options of `model` that it leaves out as they are in the run of
    `training.init_from`, and with the tokenizer of that run or of the teacher. A run that cannot be read is told of
    when its weights are."""
    start, teacher = (_recipe_of(at(values, ("training", key))) for key in ("init_from", "teacher"))
    model, tokenizer = at(start, ("model",)), at(start or teacher, ("text", "tokenizer"))
    text = values.get("text", {})
    if isinstance(model, Mapping) and isinstance(own := values.get("model", {}), Mapping):
        values = {**values, "model": {**model, **own}}
    if tokenizer is not None and isinstance(text, Mapping) and "tokenizer" not in text:
        values = {**values, "text": {**text, "tokenizer": tokenizer}}
    return values


def _recipe_of(run: object) -> Any:
    """Return the sections of the recipe of a run folder, of a run under runs/, or of a checkpoint; none if there is no
    such file."""
    if not isinstance(run, str):
        return None
    for folder in (Path(run).expanduser(), Path("runs") / run):
        try:
            return Document((folder / RECIPE).read_text(encoding="utf-8")).values
        except (OSError, ValueError, BrokenYAML):
            continue
    return None
