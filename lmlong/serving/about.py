"""What the served model is, for those who meet it on the page. Names of files stay on the server."""

from pathlib import PurePath
from typing import Any

from lmlong.inference.loading import TrainedLanguageModel
from lmlong.model.base import count_parameters
from lmlong.recipe import Recipe
from lmlong.recipe.text import Files, PythonStdlib

CODE = frozenset(
    {".c", ".cc", ".cpp", ".go", ".h", ".java", ".jl", ".js", ".py", ".r", ".rb", ".rs", ".sh", ".sql", ".ts"}
)
"""Suffixes of files that hold code."""


def about(trained: TrainedLanguageModel) -> dict[str, Any]:
    """Return a sentence about a model, and whether it `writes` code or other text."""
    read = f"{trained.trained_tokens:,} tokens" if trained.trained_tokens else "text"
    stdlib = " of Python's standard library" if _is_stdlib(trained.recipe) else ""
    sentence = f"{count_parameters(trained.model):,} parameters, trained on {read}{stdlib}."
    return {"about": sentence, "writes": "code" if _is_code(trained.recipe) else "text"}


def _is_stdlib(recipe: Recipe) -> bool:
    return all(isinstance(source, PythonStdlib) for source in recipe.text.sources)


def _is_code(recipe: Recipe) -> bool:
    return _is_stdlib(recipe) or all(
        isinstance(source, Files) and all(PurePath(path).suffix.lower() in CODE for path in source.paths)
        for source in recipe.text.sources
    )
