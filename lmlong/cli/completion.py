"""What a shell offers while a command is typed: recipes, runs, and the keys of a recipe with the words they may be.

eval "$(_LMLONG_COMPLETE=bash_source lmlong)"
"""

from collections.abc import Iterable
from pathlib import Path

import click
from click.shell_completion import CompletionItem


def recipes(context: click.Context, parameter: click.Parameter, word: str) -> list[CompletionItem]:
    """Return the shipped recipes; files are offered where none of them fits."""
    from lmlong.recipe.find import shipped_recipes

    return [CompletionItem(word, type="file"), *_matching(shipped_recipes(), word)]


def runs(context: click.Context, parameter: click.Parameter, word: str) -> list[CompletionItem]:
    """Return the runs under runs/, by path or by name; folders are offered where none of them fits."""
    names = sorted(path.parent.name for path in Path("runs").glob("*/checkpoints"))
    known = [f"runs/{name}" for name in names] + (names if word else [])
    return [CompletionItem(word, type="dir"), *_matching(known, word)]


def overrides(context: click.Context, parameter: click.Parameter, word: str) -> list[CompletionItem]:
    """Return the keys of a recipe, or the words that the value of a key may be. bash takes key=value apart, and click
    then leaves out a = that nothing follows."""
    given: tuple[str, ...] = context.params.get("overrides") or ()
    *_, key, last = ["", "", *given]
    if last == "=" or (last and not word and "=" not in last):
        return _matching(_words_of(key if last == "=" else last), word)
    key, equals, value = word.partition("=")
    if equals:
        return [CompletionItem(f"{key}={item.value}") for item in _matching(_words_of(key), value)]
    from lmlong.recipe.file import recipe_class
    from lmlong.recipe.reference import reference

    keys = dict.fromkeys(option.key.replace(".N", ".0") for option in reference(recipe_class()))
    sections = {key.rpartition(".")[0] for key in keys}
    return _matching([f"{key}=" for key in keys if key not in sections], word)


def _words_of(key: str) -> list[str]:
    """Return the words that the value of a key may be; none for numbers and texts."""
    from lmlong.recipe.file import recipe_class
    from lmlong.recipe.reference import choices, entry, sections, shape_of, shape_of_field
    from lmlong.recipe.yaml import undotted

    shape = shape_of(recipe_class())
    for part in undotted(key):
        fields = [section.model_fields[part] for section in sections(shape) if part in section.model_fields]  # type: ignore[index]
        shape = entry(shape) if isinstance(part, int) else shape_of_field(fields[0]) if fields else ()
    return ["true", "false"] if any(branch.type is bool for branch in shape) else choices(shape)


def _matching(known: Iterable[str], word: str) -> list[CompletionItem]:
    return [CompletionItem(name) for name in known if name.startswith(word)]
