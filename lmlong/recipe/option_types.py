"""Option types beyond pydantic's own, for use in `Annotated`."""

import re
from collections.abc import Mapping
from typing import Any

from pydantic import BeforeValidator, GetCoreSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from lmlong.recipe.lengths import parse_length


def _tokens(value: Any) -> Any:
    """Return a length with a unit as a number of tokens; return any other value unchanged, to be validated."""
    length = parse_length(value) if isinstance(value, str) and value[-1:].isalpha() else None
    return value if length is None else length


def _words(value: Any) -> Any:
    return [word for part in value.split(",") if (word := part.strip())] if isinstance(value, str) else value


LENGTH = BeforeValidator(_tokens)
"""A number of tokens, which may be written as 4k or 1m."""

FILE_NAMES = BeforeValidator(_words)
"""A list of file names, which may be written as one text with commas.

On a command line this needs no brackets, which a shell may expand as a file pattern. A name that contains a comma must
be in a list.
"""


class NameIn:
    """A key of a dict, looked up when a recipe is validated: plug-ins may have added keys by then."""

    def __init__(self, names: Mapping[str, Any]):
        self.names = names

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self._check)

    def _check(self, name: Any) -> str:
        if not isinstance(name, str) or name not in self.names:
            raise PydanticCustomError("literal_error", "unknown name", {"names": [name]})  # a word need not be UTF-8
        return name


class PatternIn(NameIn):
    """A key of a dict, or a pattern of keys: 3linear+softmax is linear three times, then softmax."""

    def _check(self, name: Any) -> Any:
        words = pattern_words(name) if isinstance(name, str) else [name]
        names = [super(PatternIn, self)._check(word) for word in words]
        return names if len(names) > 1 else names[0]


def pattern_words(word: str) -> list[str]:
    """Return the names in a pattern, each repeated by the number before it; the word itself if it is not a pattern."""
    names: list[str] = []
    for part in word.split("+"):
        match = re.fullmatch(r"([1-9]\d{0,3})?([^\W\d]\w*)", part)
        if match is None:
            return [word]
        names += [match[2]] * int(match[1] or 1)
    return names
