"""Overrides of a recipe's values: key.path=value on the command line, or values by key.path in Python."""

from typing import Any

from lmlong.recipe.section import Options
from lmlong.recipe.yaml import BrokenYAML, Entries, KeyPath, Section, dotted, parse_yaml, undotted


class BadOverride(Exception):
    """A text that is not a valid override, or an override that cannot be applied."""


def with_override(values: Any, text: str) -> Any:
    """Return the values with one replaced by key.path=value. The value is YAML: a number, a word, [a, list] or {a:
    section}."""
    key, equals, value = text.partition("=")
    if not equals or not all(key.split(".")):
        raise BadOverride(f"{text}: expected key.path=value, such as training.steps=20.")
    try:
        document = parse_yaml(value, origin=text)
    except BrokenYAML as error:
        raise BadOverride(f"{text}: broken YAML: {error}") from None
    if document.mistakes:
        raise BadOverride(f"{text}: {document.mistakes[0].message}")
    return _replaced(values, undotted(key), document.values, text)


def with_item(values: Any, key: str, value: Any, text: str) -> Any:
    """Return the values with the value at a key.path replaced; `text` is the override in messages."""
    if not all(key.split(".")):
        raise BadOverride(f"{text}: expected a key.path, such as training.steps.")
    return _replaced(values, undotted(key), value, text)


def sets(override: str, path: KeyPath) -> bool:
    """Return whether an override sets the value at `path`, or a section that contains it."""
    return f"{dotted(path)}.".startswith(f"{override.partition('=')[0]}.")


def _replaced(values: Any, path: KeyPath, value: Any, override: str, depth: int = 0) -> Any:
    """Return the values with one of them replaced; sections on its path are copied, since aliases may share them."""
    if depth == len(path):
        return value
    part = path[depth]
    if isinstance(values, Options):
        values = values.model_dump(exclude_unset=True)
    origins = getattr(values, "origins", {})
    copy: Any
    if isinstance(part, int) and not isinstance(values, dict):
        if not isinstance(values, list) or part >= len(values):
            above = dotted(path[:depth])
            raise BadOverride(f"{override}: {above} has no entry {part} here. Give the whole list: '{above}=[...]'")
        copy, inner = Entries(values, origins), values[part]
    else:
        part = str(part)
        copy = Section(values if isinstance(values, dict) else {}, origins)
        inner = copy.get(part)
    copy[part] = _replaced(inner, path, value, override, depth + 1)
    is_kept = isinstance(inner, dict | Options) or (isinstance(inner, list) and isinstance(copy[part], list))
    if depth + 1 == len(path) or not is_kept or isinstance(origins.get(part), str):
        copy.origins[part] = override
    return copy
