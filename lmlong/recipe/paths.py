"""Paths in the values of a recipe: made absolute, or shortened to the names of files."""

import os
from collections.abc import Callable
from pathlib import Path, PureWindowsPath
from typing import Any

from lmlong.io.standard_input import path_of

HUB = "hf://"
"""The beginning of a path on the Hugging Face Hub."""


def is_file(plugin: str) -> bool:
    """Return whether a plug-in is given as a Python file rather than as an entry point."""
    return plugin.endswith(".py") or os.sep in plugin


def is_on_hub(path: str) -> bool:
    """Return whether a path names files on the Hugging Face Hub."""
    return path.startswith(HUB)


def is_url(path: str) -> bool:
    """Return whether a path is an address on the web, which is not read."""
    return path.lower().startswith(("http://", "https://"))


def absolute(path: str | Path) -> str:
    """Return an absolute path, with ~ expanded."""
    return os.path.abspath(os.path.expanduser(path))


def with_absolute(values: dict[str, Any]) -> dict[str, Any]:
    """Make the paths in a recipe's values absolute, so that they can be read from any folder."""

    def change(path: str, is_path: bool) -> str:
        if is_on_hub(path) or is_url(path):
            return path
        file = Path(path).expanduser()
        folder = file.parent if file.parent.name == "checkpoints" else file  # checkpoints/latest is not a file
        return absolute(path_of(path)) if is_path or folder.exists() else path

    return _changed(values, change)


def without_folders(values: dict[str, Any]) -> dict[str, Any]:
    """Shorten the paths in a recipe's values to their last part."""
    values["plugins"] = [last_part(plugin, is_file(plugin)) for plugin in values["plugins"]]
    _change(values["training"]["deepspeed"], "config", last_part, True)
    return _changed(values, last_part)


def _changed(values: dict[str, Any], change: Callable[[str, bool], str]) -> dict[str, Any]:
    """Change each path in a recipe's values.

    The second argument of `change` is false for a value that may also be the name of a data set or of a run.
    """
    text = values["text"]
    for source in text["sources"] + text["validation"]["sources"]:
        _change(source, "paths", change, True)
        _change(source, "dataset", change, False)
    _change(text["tokenizer"], "path", change, True)
    _change(values["training"], "init_from", change, False)
    _change(values["training"], "teacher", change, False)
    return values


def _change(section: dict[str, Any], key: str, change: Callable[[str, bool], str], is_path: bool) -> None:
    """Change the path or the paths at a key, if there are any."""
    if isinstance(value := section.get(key), list):
        section[key] = [change(path, is_path) for path in value]
    elif value is not None:
        section[key] = change(value, is_path)


def last_part(path: str, is_path: bool = False) -> str:
    """Return the last part of a path of any operating system; a value that is not clearly a path is unchanged."""
    if is_on_hub(path):
        return path
    parsed = PureWindowsPath(path)  # splits at / too
    return parsed.name or path if is_path or parsed.root or parsed.drive or path.startswith("~") else path
