"""Paths in the values of a recipe: made absolute, or shortened to the names of files."""

import os
from collections.abc import Callable
from pathlib import Path, PureWindowsPath
from typing import Any

from lmlong.io.standard_input import path_of


def is_file(plugin: str) -> bool:
    """Return whether a plug-in is given as a Python file rather than as an entry point."""
    return plugin.endswith(".py") or os.sep in plugin


def absolute(path: str | Path) -> str:
    """Return an absolute path, with ~ expanded."""
    return os.path.abspath(os.path.expanduser(path))


def with_absolute(values: dict[str, Any]) -> dict[str, Any]:
    """Make the paths in a recipe's values absolute, so that they mean the same when read in another folder."""

    def change(path: str, is_path: bool) -> str:
        return absolute(path_of(path)) if is_path or Path(path).expanduser().exists() else path

    return _changed(values, change)


def without_folders(values: dict[str, Any]) -> dict[str, Any]:
    """Shorten the paths in a recipe's values to their last part."""
    values["plugins"] = [_name(plugin, is_file(plugin)) for plugin in values["plugins"]]
    if values["training"]["deepspeed"]["config"]:
        values["training"]["deepspeed"]["config"] = _name(values["training"]["deepspeed"]["config"], True)
    return _changed(values, _name)


def _changed(values: dict[str, Any], change: Callable[[str, bool], str]) -> dict[str, Any]:
    """Change each path in a recipe's values.

    The second argument of `change` is false for a value that may also be the name of a data set or of a run.
    """
    text, training = values["text"], values["training"]
    for source in text["sources"] + text["validation"]["sources"]:
        if source["kind"] == "files":
            source["paths"] = [change(path, True) for path in source["paths"]]
        if source["kind"] == "hub":
            source["dataset"] = change(source["dataset"], False)
    if text["tokenizer"]["path"] is not None:
        text["tokenizer"]["path"] = change(text["tokenizer"]["path"], True)
    for key in ("init_from", "teacher"):
        if training[key] is not None:
            training[key] = change(training[key], False)
    return values


def _name(path: str, is_path: bool) -> str:
    """Return the last part of a path of any operating system; a value that is not clearly a path stays as it is."""
    parsed = PureWindowsPath(path)  # splits at / too
    return parsed.name or path if is_path or parsed.root or parsed.drive or path.startswith("~") else path
