"""What every section of a recipe is: typed keys, none but those declared."""

from pydantic import BaseModel, ConfigDict
from pydantic_core import PydanticCustomError


class Options(BaseModel):
    """A section of a recipe: unknown keys are refused, values are never converted in silence."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


def mistake(key: str, message: str) -> PydanticCustomError:
    """A mistake that only several keys together show; `key`, dotted and within the section, is where it is reported."""
    return PydanticCustomError("mistake", "{message}", {"key": key, "message": message})
