"""The base class of all sections of a recipe: typed keys, unknown keys refused."""

from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

from lmlong.errors import RecipeError
from lmlong.recipe.mistakes import messages
from lmlong.recipe.yaml import dotted


class Options(BaseModel):
    """A section of a recipe: unknown keys are refused, and values are not converted between types."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    def __init__(self, /, **values: Any) -> None:
        """Validate the values; all mistakes in them are raised as one `RecipeError`."""
        try:
            super().__init__(**values)
        except ValidationError as error:
            found = messages(error, values, type(self))
            raise RecipeError([f"{dotted(path)}: {message}" for path, message in found.items()]) from None

    # As on pydantic's own `__init__`: nested sections are validated together, so that no mistake hides another.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    def disagreements(self) -> Iterator[PydanticCustomError]:
        """Iterate over the mistakes in combinations of keys."""
        yield from ()

    @model_validator(mode="after")
    def agree(self) -> "Options":
        errors = [InitErrorDetails(type=error, input=None) for error in self.disagreements()]
        if errors:
            raise ValidationError.from_exception_data(type(self).__name__, errors)
        return self


def mistake(key: str, message: str) -> PydanticCustomError:
    """Return a mistake in a combination of keys, reported at `key`, a dotted path within the section."""
    return PydanticCustomError("mistake", "{message}", {"key": key, "message": message})


def completed(values: Any, defaults: dict[str, Any]) -> Any:
    """Return a section with `defaults` for the missing keys, also in nested sections."""
    if not isinstance(values, dict):
        return values
    complete = dict(values)
    for key, default in defaults.items():
        section = values.get(key, {})
        complete[key] = completed(section, default) if isinstance(default, dict) else values.get(key, default)
    return complete
