"""Sentences about the mistakes in a recipe: in its YAML, in its overrides, and the errors of pydantic in its values."""

from collections.abc import Iterable
from difflib import get_close_matches
from math import inf
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from lmlong.errors import nearest
from lmlong.recipe.bounds import LARGEST_SHOWN
from lmlong.recipe.option_types import FILE_NAMES
from lmlong.recipe.reference import (
    Shape,
    choices,
    entry,
    in_words,
    is_list,
    kind_of,
    kinds_of,
    reference,
    sections,
    shape_of,
    shape_of_field,
)
from lmlong.recipe.yaml import UNREADABLE, KeyPath, Mistake, Tree, at, dotted, undotted

MAX_SHOWN = 60
"""The characters of a value that a message shows."""

MAX_LISTED, MAX_NEAREST = 8, 3
"""The message for an unknown key lists all keys of a section with up to MAX_LISTED keys, else the MAX_NEAREST most
similar."""

REMOVED: dict[KeyPath, str] = {
    ("training", "keep_predictions"): "The teacher predicts in each step.",
    ("conversion", "keep_predictions"): "The teacher predicts in each step.",
    ("training", "learn"): "Every model can learn while it reads.",
}
"""Options of earlier versions, and what happens without them. All were off by default."""

SYNONYMS: dict[str, tuple[str, ...]] = {
    "learning_rate": ("lr", "max_lr", "step_size"),
    "steps": ("max_steps", "num_steps", "max_iters", "iterations"),
    "epochs": ("num_epochs", "num_train_epochs", "max_epochs"),
    "clip": ("grad_clip", "max_grad_norm", "gradient_clip_val"),
    "accumulate": ("gradient_accumulation_steps", "grad_accum"),
    "sequence_length": ("context_length", "context_window", "context_size", "block_size", "max_length", "max_seq_len"),
    "width": ("d_model", "n_embd", "hidden_size", "hidden_dim"),
    "layers": ("n_layer", "num_layers", "num_hidden_layers", "depth"),
    "heads": ("n_head", "num_heads", "num_attention_heads"),
    "vocabulary": ("vocab_size",),
}
"""What options are called in other programs."""


def sentences(tree: Tree, mistakes: Iterable[Mistake]) -> list[str]:
    """Return one sentence for each mistake: first those in the file by line, then those in overrides in their order."""

    def position(mistake: Mistake) -> tuple[bool, int]:
        origin = mistake.origin
        return (True, tree.overrides.index(origin)) if isinstance(origin, str) else (False, origin)

    return [_sentence(tree, mistake) for mistake in sorted(mistakes, key=position)]


def _sentence(tree: Tree, mistake: Mistake) -> str:
    key, origin = dotted(mistake.path), mistake.origin
    if isinstance(origin, int):
        where = [f"{tree.file}:{origin}"] if tree.file else []
    else:
        where = [origin]
        key = "" if origin.startswith(f"{key}=") else key
    return ": ".join([*where, *([key] if key else []), mistake.message])


def messages(error: ValidationError, values: Any, section: type[BaseModel]) -> dict[KeyPath, str]:
    """Return a message for each wrong key in the values of a section."""
    found: dict[KeyPath, str] = {}
    for detail in error.errors(include_url=False):
        explain = _unknown_key if detail["type"] == "extra_forbidden" else _wrong_value
        path, message = explain(detail, values, section)
        if message:
            found.setdefault(path, message)
    return found


def _unknown_key(detail: ErrorDetails, values: Any, section: type[BaseModel]) -> tuple[KeyPath, str]:
    """Return the path of an unknown key, and a message that names a similar key of its section, else options of
    that name in any section below, else keys of its section."""
    *outer, key = detail["loc"]
    above, shape = _follow(tuple(outer), values, section)
    path = (*above, key)
    if path in REMOVED:
        return path, f"no longer an option. {REMOVED[path]} Leave it out."
    names = list(sections(shape)[0].model_fields)
    hint = nearest(key, names) if _own_name(str(key)) == key else ""
    elsewhere = [other for other in paths_of(str(key), section) if other != dotted(path)]  # of another kind of section
    if not hint and elsewhere:
        hint = f" Did you mean {' or '.join(map(repr, elsewhere))}?"
    hint = hint or _of_other_kind(path, at(values, path), section) or _known_keys(key, above, names)
    return path, f"unknown key.{hint}"


def _wrong_value(detail: ErrorDetails, values: Any, section: type[BaseModel]) -> tuple[KeyPath, str]:
    """Return the path of a missing or wrong value, and its message, which is empty if another error reports it."""
    context = detail.get("ctx", {})
    path, shape = _follow(detail["loc"], values, section)
    value = at(values, path)
    if value is UNREADABLE or not shape:
        return path, ""
    match detail["type"]:
        case "missing":
            return path, f"missing. Expected {in_words(shape)}."
        case "mistake":
            path = (*path, *undotted(context["key"]))
            in_a_word = isinstance(path[-1], int) and isinstance(at(values, path[:-1]), str)  # a pattern
            return path[:-1] if in_a_word else path, context["message"]
        case "union_tag_not_found" if isinstance(value, dict):
            return (*path, "kind"), f"missing. Expected one of {', '.join(kinds_of(shape))}."
        case "union_tag_invalid":
            return (*path, "kind"), _not_one_of(value["kind"], kinds_of(shape))
        case "literal_error":
            (name,) = context.get("names", [value])
            return path, _not_one_of(name, choices(shape))
    most = inf if detail["type"] == "less_than_equal" else LARGEST_SHOWN
    return path, f"expected {in_words(shape, most)}, got {_show(value)}.{_remedy(shape, value, path)}"


def _follow(where: tuple[int | str, ...], values: Any, section: type[BaseModel]) -> tuple[KeyPath, Shape]:
    """Return the user's path for pydantic's location, and the shape expected there.

    Pydantic's location also contains the union branch that it tried, which is not a key. The shape is empty if the
    value does not belong to that branch: it is a word and the branch a list, or the reverse.
    """
    path: KeyPath = ()
    shape = shape_of(section)
    for part in where:
        kinds = sections(shape)
        if len(kinds) > 1:
            shape = tuple(branch for branch in shape if branch.type in kinds and kind_of(branch.type) == part)
        elif kinds:
            path, shape = (*path, part), shape_of_field(kinds[0].model_fields[str(part)])
        elif entry(shape) and len(shape) > 1:
            listed = str(part).startswith("list[")
            is_meant = isinstance(at(values, path), list) == listed
            shape = tuple(branch for branch in shape if is_meant and is_list(branch) == listed)
        else:
            path, shape = (*path, part), entry(shape)
    return path, shape


def _not_one_of(value: Any, words: list[str]) -> str:
    return f"{_show(value)} is not one of {', '.join(words)}.{nearest(value, words)}"


def _of_other_kind(path: KeyPath, value: Any, section: type[BaseModel]) -> str:
    """Return a hint how to write a list if a key of its entry belongs to entries of another kind."""
    for option in reference(section):
        if option.kind and option.key == _with_n(path):
            entry = f'{{kind: {option.kind}, {path[-1]}: "{_short(value)}"}}'
            return f" It needs another kind. Write '{dotted(path[:-2])}=[{entry}]'."
    return ""


def _with_n(path: KeyPath) -> str:
    """Return a path as the reference names it, with N for each index."""
    return dotted(tuple("N" if isinstance(part, int) else part for part in path))


def _known_keys(key: object, section: KeyPath, names: list[str]) -> str:
    """Return a hint: all keys of a short section, or a few of a long one."""
    if len(names) <= MAX_LISTED:
        return f" Known here: {', '.join(names)}."
    close = get_close_matches(str(key), names, n=MAX_NEAREST, cutoff=0)
    name = _with_n(section)
    all_of_them = f"`lmlong recipe options{' ' + name if name else ''}` lists all"
    return f" Nearest here: {', '.join(close)}; {all_of_them}."


def paths_of(name: str, recipe: type[BaseModel]) -> list[str]:
    """Return the full paths of the options with a name or a synonym, such as training.steps for steps.

    Only the outermost sections that have one count; the list is empty if there are more than a few.
    """
    own_name = _own_name(name.replace("-", "_"))
    keys = dict.fromkeys(option.key.replace(".N.", ".0.") for option in reference(recipe))
    paths = [key for key in keys if key.rpartition(".")[2] == own_name]
    least = min((path.count(".") for path in paths), default=0)
    outer = [path for path in paths if path.count(".") == least]
    return outer if len(outer) <= MAX_NEAREST else []


def _own_name(name: str) -> str:
    """Return the name of an option here, if this is its name elsewhere."""
    return next((own for own, names in SYNONYMS.items() if name in names), name)


def _show(value: Any) -> str:
    """Return a value as the user wrote it, shortened if it is long."""
    if isinstance(value, dict):
        return "a section"
    if isinstance(value, list):
        return "a list" if value else "an empty list"
    if value is None or isinstance(value, bool):
        return {None: "nothing", True: "true", False: "false"}[value]
    return repr(value) if len(repr(value)) <= MAX_SHOWN else repr(value)[:56] + " ..."


def _as_entry(listed: list[type[BaseModel]], value: dict[str, Any], path: KeyPath) -> str:
    """Return a hint how to write a section that must be an entry of a list: given by one of its keys, or its kind."""
    key, inner = next(iter(value.items()))
    if key in [kind for section in listed for kind in choices(shape_of_field(section.model_fields["kind"]))]:
        return f" Write [{{kind: {key}, ...}}]."
    is_key = "kind" not in value and any(key in section.model_fields for section in listed)
    return f" Write '{dotted((*path, 0, key))}={_short(inner)}'." if is_key else ""


def _short(value: Any) -> str:
    """Return a value on the right of an override, if it is a short one."""
    return str(value) if isinstance(value, str | int | float) and len(str(value)) <= MAX_SHOWN else "..."


def _named_by(word: str, shape: Shape) -> str:
    """Return the option of a section that a single word probably stands for: its kind or its files."""
    fields = [each for section in sections(shape) for each in section.model_fields.items()]
    files = [name for name, field in fields if FILE_NAMES in field.metadata]
    return files[0] if files and word not in kinds_of(shape) else "kind"


def _remedy(shape: Shape, value: Any, path: KeyPath) -> str:
    """Return a hint how to write the value that was probably meant."""
    types = [branch.type for branch in shape]
    if str in types and isinstance(value, bool | int | float):
        return " Put it in quotes."
    if int in types and isinstance(value, float) and value.is_integer():
        return f" Write {int(value)}."
    if sections(entry(shape)) and isinstance(value, dict) and value:
        return _as_entry(sections(entry(shape)), value, path)
    inner = entry(shape) or shape
    if isinstance(value, str) and any("kind" in section.model_fields for section in sections(inner)[:1]):
        first = (*path, 0) if entry(shape) else path
        return f" Write '{dotted((*first, _named_by(value, inner)))}={_short(value)}'."
    if entry(shape) and isinstance(value, str):
        return f" Write [{value}]."
    return ""
