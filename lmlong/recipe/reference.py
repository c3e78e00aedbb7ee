"""The declared options as data: a list of all keys, and their allowed values in plain words.

The reference and the error messages are derived from the declarations, so they always agree with them.
"""

from collections.abc import Iterator
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import to_jsonable_python

from lmlong.recipe.bounds import LARGEST_SHOWN
from lmlong.recipe.option_types import FILE_NAMES, LENGTH, NameIn

PLAIN = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
BOUNDS = {"gt": "above {}", "ge": "at least {}", "lt": "below {}", "le": "at most {}", "pattern": "of the form {}"}


class Option(NamedTuple):
    """One key of a recipe in the reference."""

    key: str
    """Dotted path; N stands for an index in a list."""
    type: str
    required: bool
    default: Any
    meaning: str
    kind: str | None
    """The kind of section that has this key, if the section has several kinds."""


class Branch(NamedTuple):
    """One of the types that an option allows, with its bounds; NoneType stands for null."""

    type: Any
    bounds: tuple[Any, ...] = ()


Shape = tuple[Branch, ...]
"""The allowed values of an option: several branches for a union."""


def shape_of(annotation: Any, bounds: tuple[Any, ...] = ()) -> Shape:
    """Return the shape that an annotation declares."""
    if get_origin(annotation) is Annotated:
        annotation, *extras = get_args(annotation)
        inner = [bound for extra in extras for bound in (extra.metadata if isinstance(extra, FieldInfo) else [extra])]
        return shape_of(annotation, (*bounds, *inner))
    if get_origin(annotation) in (Union, UnionType):
        return tuple(branch for each in get_args(annotation) for branch in shape_of(each, bounds))
    return (Branch(annotation, bounds),)


def shape_of_field(field: FieldInfo) -> Shape:
    """Return the shape of one declared option."""
    return shape_of(field.annotation, tuple(field.metadata))


def is_list(branch: Branch) -> bool:
    return get_origin(branch.type) is list


def entry(shape: Shape) -> Shape:
    """Return the shape of a list's entries if a shape allows a list, else an empty shape."""
    return next((shape_of(get_args(branch.type)[0]) for branch in shape if is_list(branch)), ())


def sections(shape: Shape) -> list[type[BaseModel]]:
    """Return the declarations of the sections that a shape allows."""
    return [branch.type for branch in shape if isinstance(branch.type, type) and issubclass(branch.type, BaseModel)]


def kind_of(section: type[BaseModel]) -> str | None:
    """Return the value of `kind` for this section, if there are several kinds."""
    words = choices(shape_of_field(section.model_fields["kind"])) if "kind" in section.model_fields else []
    return words[0] if len(words) == 1 else None


def kinds_of(shape: Shape) -> list[str]:
    """Return the kinds of the sections that a shape allows, if there are several."""
    return [kind for section in sections(shape) if (kind := kind_of(section))]


def choices(shape: Shape) -> list[str]:
    """Return the words that a shape allows."""
    words: list[str] = []
    for branch in shape:
        words += [name for bound in branch.bounds if isinstance(bound, NameIn) for name in bound.names]
        words += map(str, get_args(branch.type) if get_origin(branch.type) is Literal else ())
    return words


def in_words(shape: Shape, most: float = LARGEST_SHOWN) -> str:
    """Return a shape in plain words, such as 'a whole number, above 0, or null'. Upper limits larger than `most` are
    omitted."""
    words = [_branch_in_words(branch, most) for branch in shape if not sections((branch,)) and branch.type != NoneType]
    if sections(shape):
        kinds = kinds_of(shape)
        words.append("a section" + (f" of kind {', '.join(kinds)}" if kinds else ""))
    return " or ".join(words) + (", or null" if any(branch.type == NoneType for branch in shape) else "")


def _branch_in_words(branch: Branch, most: float) -> str:
    limits = [
        text.format(limit)
        for name, text in BOUNDS.items()
        for limit in _limits(branch, name)
        if name != "le" or limit <= most
    ]
    return ", ".join([_type_in_words(branch), *limits])


def _type_in_words(branch: Branch) -> str:
    if words := choices((branch,)):
        return f"one of {', '.join(words)}"
    if branch.type is int and LENGTH in branch.bounds:
        return f"{PLAIN[int]} (or such as 4k, 1m)"
    if is_list(branch):
        length = "".join(f" of {limit} or more" for limit in _limits(branch, "min_length"))
        if FILE_NAMES in branch.bounds:
            return "one or more file names, such as a.txt,b.txt"
        return f"a list{length}, each {in_words(entry((branch,)))}"
    return PLAIN[branch.type]


def _limits(branch: Branch, name: str) -> list[Any]:
    return [getattr(bound, name) for bound in branch.bounds if getattr(bound, name, None) is not None]


def reference(section: type[BaseModel]) -> list[Option]:
    """Return every declared option of a section, such as a whole recipe; each section precedes its keys."""
    return list(_walk(section, ""))


def _walk(section: type[BaseModel], prefix: str) -> Iterator[Option]:
    for name, field in section.model_fields.items():
        key, shape = prefix + name, shape_of_field(field)
        below, inner = key + ".", shape
        while entry(inner):
            below, inner = below + "N.", entry(inner)
        described = section if name == "kind" else next(iter(sections(shape)), None)
        meaning = field.description or (described.__doc__ if described else None) or ""
        default = None if field.is_required() else to_jsonable_python(field.get_default(call_default_factory=True))
        yield Option(key, in_words(shape), field.is_required(), default, " ".join(meaning.split()), kind_of(section))
        for kind in sections(inner):
            yield from _walk(kind, below)
