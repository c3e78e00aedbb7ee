"""Mistakes in the values of a recipe: pydantic's errors as one plain sentence for each key."""

from difflib import get_close_matches
from math import inf
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from lmlong.errors import nearest
from lmlong.recipe import Options
from lmlong.recipe.bounds import UNSAID
from lmlong.recipe.kinds import pattern_words
from lmlong.recipe.reference import (
    Shape,
    choices,
    entry,
    in_words,
    kind_of,
    reference,
    sections,
    shape_of_field,
    takes_patterns,
)
from lmlong.recipe.root import Recipe, recipe_class
from lmlong.recipe.yaml import UNREADABLE, KeyPath, at, dotted, undotted

LISTED, NEAREST = 8, 3
"""Most keys of a section that are all named to whoever gave an unknown one, and how many of a longer section."""


def mistakes(error: ValidationError, values: Any, section: type[Options] | None = None) -> dict[KeyPath, str]:
    """Return the mistake of each wrong key in the values of a section, by default the whole recipe."""
    found: dict[KeyPath, str] = {}
    for detail in error.errors(include_url=False):
        path, message = _describe(detail, values, section or recipe_class())
        if message:
            found.setdefault(path, message)
    return found


def _describe(detail: ErrorDetails, values: Any, whole: type[Options]) -> tuple[KeyPath, str]:
    """Return the key of one error of pydantic, and its message; an empty one where another error says it."""
    where, context = detail["loc"], detail.get("ctx", {})
    if detail["type"] == "extra_forbidden":
        path, section = _follow(where[:-1], values, whole)
        return (*path, where[-1]), "unknown key." + _hint(
            where[-1], path, list(sections(section)[0].model_fields), whole
        )
    path, shape = _follow(where, values, whole)
    value = at(values, path)
    if value is UNREADABLE or not shape.types:
        return path, ""
    match detail["type"]:
        case "missing":
            return path, f"missing. Expected {in_words(shape)}."
        case "mistake":
            path = (*path, *undotted(context["key"]))
            in_a_word = isinstance(path[-1], int) and isinstance(at(values, path[:-1]), str)  # a pattern
            return path[:-1] if in_a_word else path, context["message"]
        case "union_tag_not_found":
            return (*path, "kind"), f"missing. Expected one of {', '.join(_kinds(shape))}."
        case "union_tag_invalid":
            return (*path, "kind"), _not_one_of(value["kind"], _kinds(shape))
        case "literal_error":
            names = pattern_words(value) if isinstance(value, str) and takes_patterns(shape) else [value]
            known = choices(shape)
            return path, _not_one_of(next(name for name in names if name not in known), known)
    most = inf if detail["type"] == "less_than_equal" else UNSAID
    return path, f"expected {in_words(shape, most)}, got {_show(value)}.{_remedy(shape, value)}"


def _follow(where: tuple[int | str, ...], values: Any, whole: type[Options]) -> tuple[KeyPath, Shape]:
    """Return the user's path for pydantic's location, and the shape expected there.

    Pydantic's location also names the branch of a union that it tried, which is no key. Where that is not the branch
    that the value is meant for, a list where the value is a word or the reverse, the shape is empty.
    """
    path: KeyPath = ()
    shape = Shape((whole,))
    for part in where:
        kinds = sections(shape)
        if len(kinds) > 1:
            shape = Shape(tuple(kind for kind in kinds if kind_of(kind) == part))
        elif kinds:
            path, shape = (*path, part), shape_of_field(kinds[0].model_fields[str(part)])
        elif entry(shape) and len(shape.types) > 1:
            listed = str(part).startswith("list[")
            tried = tuple(kind for kind in shape.types if bool(entry(Shape((kind,)))) == listed)
            shape = Shape(tried if isinstance(at(values, path), list) == listed else ())
        else:
            path, shape = (*path, part), entry(shape) or Shape(())
    return path, shape


def _kinds(shape: Shape) -> list[str]:
    return [str(kind_of(section)) for section in sections(shape)]


def _not_one_of(value: Any, words: list[str]) -> str:
    return f"{_show(value)} is not one of {', '.join(words)}.{nearest(value, words)}"


def _hint(key: object, section: KeyPath, known: list[str], whole: type[Options]) -> str:
    """Return the known key that was probably meant, all of a short section, or the nearest of a long one."""
    if issubclass(whole, Recipe) and (paths := paths_of(str(key), whole)):
        return f" Did you mean {' or '.join(map(repr, paths))}?"
    if len(known) <= LISTED:
        return nearest(key, known) or f" Known here: {', '.join(known)}."
    close = get_close_matches(str(key), known, n=NEAREST, cutoff=0)
    name = dotted(tuple("N" if isinstance(part, int) else part for part in section))
    all_of_them = f"`lmlong recipe options{' ' + name if name else ''}` lists all"
    return nearest(key, known) or f" Nearest here: {', '.join(close)}; {all_of_them}."


def paths_of(name: str, recipe: type[Recipe] | None = None) -> list[str]:
    """Return the full paths of the options of a name, such as training.steps for steps: those of the outermost sections
    that have one, unless these are many."""
    wanted = name.replace("-", "_")
    keys = dict.fromkeys(option.key.replace(".N.", ".0.") for option in reference(recipe))
    paths = [key for key in keys if "." in key and key.rpartition(".")[2] == wanted]
    least = min((path.count(".") for path in paths), default=0)
    outer = [path for path in paths if path.count(".") == least]
    return outer if len(outer) <= NEAREST else []


def _show(value: Any) -> str:
    """Return a value as the user wrote it, shortened where it is long."""
    if isinstance(value, dict):
        return "a section"
    if isinstance(value, list):
        return "a list" if value else "an empty list"
    if value is None or isinstance(value, bool):
        return {None: "nothing", True: "true", False: "false"}[value]
    return repr(value) if len(repr(value)) <= 60 else repr(value)[:56] + " ..."


def _remedy(shape: Shape, value: Any) -> str:
    """Return how to write what was probably meant."""
    if str in shape.types and isinstance(value, bool | int | float):
        return " Put it in quotes."
    if int in shape.types and isinstance(value, float) and value.is_integer():
        return f" Write {int(value)}."
    if entry(shape) and isinstance(value, str):
        return f" Write [{value}]."
    return ""
