"""The base class of every section of a recipe: typed keys, and no others."""

from collections.abc import Iterator

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError


class Options(BaseModel):
    """A section of a recipe: unknown keys are refused, values are never converted in silence."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    def disagreements(self) -> Iterator[PydanticCustomError]:
        """Iterate over the mistakes that only several keys together show."""
        yield from ()

    @model_validator(mode="after")
    def agree(self) -> "Options":
        found = [InitErrorDetails(type=error, input=None) for error in self.disagreements()]
        if found:
            raise ValidationError.from_exception_data(type(self).__name__, found)
        return self


def mistake(key: str, message: str) -> PydanticCustomError:
    """Return a mistake that only several keys together show, reported at `key`, dotted and within the section."""
    return PydanticCustomError("mistake", "{message}", {"key": key, "message": message})
