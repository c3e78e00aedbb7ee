"""The declared options as data: the list of every key, and the allowed values in plain words.

The reference and the error messages are derived from the declarations, so they cannot disagree with them.
"""

from collections.abc import Iterator
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import to_jsonable_python

from lmlong.recipe.bounds import LARGEST_SHOWN
from lmlong.recipe.option_types import CommaList, IsLength, NameIn, PatternIn

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
    """The kind of section that has this key, where a section has several kinds."""


class Shape(NamedTuple):
    """The allowed values of an option: types (several for a union, NoneType for null) and their bounds."""

    types: tuple[Any, ...]
    bounds: tuple[Any, ...] = ()


def shape_of(annotation: Any, bounds: tuple[Any, ...] = ()) -> Shape:
    """Return the shape that an annotation declares."""
    if get_origin(annotation) is Annotated:
        annotation, *extras = get_args(annotation)
        inner = [bound for extra in extras for bound in (extra.metadata if isinstance(extra, FieldInfo) else [extra])]
        return shape_of(annotation, (*bounds, *inner))
    if get_origin(annotation) in (Union, UnionType):
        return Shape(get_args(annotation), bounds)
    return Shape((annotation,), bounds)


def shape_of_field(field: FieldInfo) -> Shape:
    """Return the shape of one declared option."""
    return shape_of(field.annotation, tuple(field.metadata))


def sections(shape: Shape) -> list[type[BaseModel]]:
    """Return the declarations of the sections that a shape allows."""
    return [kind for kind in shape.types if isinstance(kind, type) and issubclass(kind, BaseModel)]


def kind_of(section: type[BaseModel]) -> str | None:
    """Return the value of `kind` for this section, where there are several kinds."""
    words = choices(shape_of_field(section.model_fields["kind"])) if "kind" in section.model_fields else []
    return words[0] if len(words) == 1 else None


def choices(shape: Shape) -> list[str]:
    """Return the words that a shape allows."""
    found = [name for bound in shape.bounds if isinstance(bound, NameIn) for name in bound.names]
    for kind in shape.types:
        if get_origin(kind) is Literal:
            found += [str(word) for word in get_args(kind)]
        elif get_origin(kind) is Annotated:
            found += choices(shape_of(kind))
    return found


def takes_patterns(shape: Shape) -> bool:
    """Whether a shape allows several of its words in one."""
    inner = (shape_of(kind) for kind in shape.types if get_origin(kind) is Annotated)
    return any(isinstance(bound, PatternIn) for bound in shape.bounds) or any(map(takes_patterns, inner))


def entry(shape: Shape) -> Shape | None:
    """Return the shape of a list's entries, where a shape allows a list."""
    for kind in shape.types:
        bare = shape_of(kind).types[0]
        if get_origin(bare) is list:
            return shape_of(get_args(bare)[0])
    return None


def in_words(shape: Shape, most: float = LARGEST_SHOWN) -> str:
    """Return a shape in plain words, such as 'a whole number, above 0, or null', without upper limits beyond `most`."""
    words = [_type_in_words(kind, shape.bounds) for kind in shape.types if kind not in (NoneType, *sections(shape))]
    if sections(shape):
        kinds = [kind for section in sections(shape) if (kind := kind_of(section))]
        words.append("a section" + (f" of kind {', '.join(kinds)}" if kinds else ""))
    limits = [
        text.format(limit)
        for name, text in BOUNDS.items()
        for limit in _limits(shape.bounds, name)
        if name != "le" or limit <= most
    ]
    return ", ".join([" or ".join(words), *limits]) + (", or null" if NoneType in shape.types else "")


def _type_in_words(kind: Any, bounds: tuple[Any, ...]) -> str:
    if get_origin(kind) is Annotated:
        return in_words(shape_of(kind))
    if words := choices(Shape((kind,), bounds)):
        return f"one of {', '.join(words)}"
    if kind is int and any(isinstance(bound, IsLength) for bound in bounds):
        return f"{PLAIN[int]} (or such as 4k, 1m)"
    if get_origin(kind) is list:
        length = "".join(f" of {limit} or more" for limit in _limits(bounds, "min_length"))
        commas = " (or such as a,b)" if any(isinstance(bound, CommaList) for bound in bounds) else ""
        return f"a list{length}, each {in_words(shape_of(get_args(kind)[0]))}{commas}"
    return PLAIN[kind]


def _limits(bounds: tuple[Any, ...], name: str) -> list[Any]:
    return [getattr(bound, name) for bound in bounds if getattr(bound, name, None) is not None]


def reference(section: type[BaseModel]) -> list[Option]:
    """Return every option of a section, such as a whole recipe, as declared; each section comes before its keys."""
    return list(_walk(section, ""))


def _walk(section: type[BaseModel], prefix: str) -> Iterator[Option]:
    for name, field in section.model_fields.items():
        key, shape = prefix + name, shape_of_field(field)
        below, inner = key + ".", shape
        while (entries := entry(inner)) is not None:
            below, inner = below + "N.", entries
        described = section if name == "kind" else next(iter(sections(shape)), None)
        meaning = field.description or (described.__doc__ if described else None) or ""
        default = None if field.is_required() else to_jsonable_python(field.get_default(call_default_factory=True))
        yield Option(key, in_words(shape), field.is_required(), default, " ".join(meaning.split()), kind_of(section))
        for kind in sections(inner):
            yield from _walk(kind, below)
