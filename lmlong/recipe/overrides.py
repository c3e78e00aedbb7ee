"""Overrides of a recipe's values: key.path=value on the command line, values by their key.path in Python."""

from typing import Any, NamedTuple

from lmlong.recipe.section import Options
from lmlong.recipe.yaml import BrokenYAML, Document, KeyPath, dotted, undotted


class Override(NamedTuple):
    """One value by its key.path; `text` is what the user wrote."""

    text: str
    path: KeyPath
    value: Any

    def sets(self, path: KeyPath) -> bool:
        """Return whether the value at `path` is, or is within, the value of this override."""
        return dotted((*path, "")).startswith(dotted((*self.path, "")))

    def lies_in(self, path: KeyPath) -> bool:
        """Return whether this override sets something at or below `path`."""
        return dotted((*self.path, "")).startswith(dotted((*path, "")))


class BadOverride(Exception):
    """Text that is not an override, or an override that cannot be applied."""


def parse(text: str) -> Override:
    """Parse key.path=value, where the value is YAML: a number, a word, [a, list] or {a: section}."""
    key, equals, value = text.partition("=")
    if not equals or not all(key.split(".")):
        raise BadOverride(f"{text}: expected key.path=value, such as training.steps=20.")
    try:
        document = Document(value)
    except BrokenYAML as error:
        raise BadOverride(f"{text}: broken YAML: {error}") from None
    if document.mistakes:
        raise BadOverride(f"{text}: {document.mistakes[0][2]}")
    return Override(text, undotted(key), document.values)


def from_item(key: str, value: Any) -> Override:
    """Return the override of one item of a dict."""
    text = f"{key}={value!r}"
    if not all(key.split(".")):
        raise BadOverride(f"{text}: expected a key.path, such as training.steps.")
    return Override(text, undotted(key), value)


def place(values: Any, override: Override, depth: int = 0) -> Any:
    """Return the values with one of them replaced; sections on its path are copied, since aliases may share them."""
    if depth == len(override.path):
        return override.value
    part, above = override.path[depth], dotted(override.path[:depth])
    if isinstance(part, int) and not isinstance(values, dict):
        if not isinstance(values, list) or part >= len(values):
            raise BadOverride(
                f"{override.text}: {above} has no entry {part} here. Give the whole list: '{above}=[...]'"
            )
        return [*values[:part], place(values[part], override, depth + 1), *values[part + 1 :]]
    if isinstance(values, Options):
        values = values.model_dump(exclude_unset=True)
    section = values if isinstance(values, dict) else {}
    return section | {str(part): place(section.get(str(part)), override, depth + 1)}
