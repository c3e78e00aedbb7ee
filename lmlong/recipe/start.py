"""Options that a recipe takes from another run, whose weights it starts from or which is its teacher."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lmlong.recipe.yaml import BrokenYAML, Document, at

RECIPE = "recipe.yaml"
"""The file in a run folder or checkpoint that holds its recipe."""


def with_start(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a recipe with its missing options of `model` and its missing tokenizer filled in.

    The options are those of the run of `training.init_from`, and the tokenizer that of the same run or of the teacher.
    A run that cannot be read is ignored here and reported when its weights are loaded.
    """
    start, teacher = (_recipe_of(at(values, ("training", key))) for key in ("init_from", "teacher"))
    model, tokenizer = at(start, ("model",)), at(start or teacher, ("text", "tokenizer"))
    text = values.get("text", {})
    if isinstance(model, Mapping) and isinstance(own := values.get("model", {}), Mapping):
        values = {**values, "model": {**model, **own}}
    if tokenizer is not None and isinstance(text, Mapping) and "tokenizer" not in text:
        values = {**values, "text": {**text, "tokenizer": tokenizer}}
    return values


def _recipe_of(run: object) -> Any:
    """Return the sections of the recipe in a run folder, a run under runs/ or a checkpoint, or None."""
    if not isinstance(run, str):
        return None
    for folder in (Path(run).expanduser(), Path("runs") / run):
        try:
            return Document((folder / RECIPE).read_text(encoding="utf-8")).values
        except (OSError, ValueError, BrokenYAML):
            continue
    return None
