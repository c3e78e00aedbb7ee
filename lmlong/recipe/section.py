"""The base class of every section of a recipe: typed keys, and no others."""

from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, ValidationError, model_validator
from pydantic_core import CoreSchema, InitErrorDetails, PydanticCustomError, core_schema

from lmlong.errors import RecipeError


class Options(BaseModel):
    """A section of a recipe: unknown keys are refused, values are never converted in silence."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    def __init__(self, /, **values: Any) -> None:
        """A section from its values; all that is wrong with them is one `RecipeError`."""
        try:
            super().__init__(**values)
        except ValidationError as error:
            from lmlong.recipe.mistakes import mistakes  # it walks the sections, which are declared by this class
            from lmlong.recipe.yaml import dotted

            found = mistakes(error, values, type(self))
            raise RecipeError([f"{dotted(path)}: {message}" for path, message in found.items()]) from None

    # As on pydantic's own: a section within others is validated with them, so that no mistake hides the next ones.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    def disagreements(self) -> Iterator[PydanticCustomError]:
        """Iterate over the mistakes that only several keys together show."""
        yield from ()

    @model_validator(mode="after")
    def agree(self) -> "Options":
        found = [InitErrorDetails(type=error, input=None) for error in self.disagreements()]
        if found:
            raise ValidationError.from_exception_data(type(self).__name__, found)
        return self


class CommaList:
    """The mark of an option that is a list of texts, which may be written as one text with commas between them.

    On a command line this needs no brackets, which a shell may read as a pattern of file names. A text that contains a
    comma must be written in a list.
    """

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(_split, handler(source))


def _split(value: Any) -> Any:
    return [word for part in value.split(",") if (word := part.strip())] if isinstance(value, str) else value


def mistake(key: str, message: str) -> PydanticCustomError:
    """Return a mistake that only several keys together show, reported at `key`, dotted and within the section."""
    return PydanticCustomError("mistake", "{message}", {"key": key, "message": message})


def completed(values: Any, defaults: dict[str, Any]) -> Any:
    """Return a section with `defaults` for the keys that are not given, also in the sections within it."""
    if not isinstance(values, dict):
        return values
    found = {
        key: completed(values.get(key, {}), default) if isinstance(default, dict) else values.get(key, default)
        for key, default in defaults.items()
    }
    return {**values, **found}
