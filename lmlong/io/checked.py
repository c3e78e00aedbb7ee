"""Type-check values of files from other programs before they are used."""

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from lmlong.errors import CheckpointError

SHOWN = 60
"""Characters of a wrong value in a message."""
MAX_MISTAKES = 10


class Checked(BaseModel):
    """Values of a file, each of exactly its type. Unused values are not checked."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, protected_namespaces=())


Values = TypeVar("Values", bound=Checked)


def checked(
    kind: type[Values], file: object, values: Mapping[str, Any], keys: Mapping[str, str] | None = None
) -> Values:
    """Return the values of a file as `kind`, or raise an error that names each wrong value. `keys` maps names of `kind`
    to the file's names that differ."""
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        mistakes = error.errors(include_url=False, include_context=False)
    lines = []
    for mistake in mistakes[:MAX_MISTAKES]:
        first, *rest = map(str, mistake["loc"] or ("",))
        key = ".".join([(keys or {}).get(first, first), *rest])
        if mistake["type"] == "missing":
            lines.append(f"{key} is missing")
        elif mistake["type"] == "value_error":
            lines.append(f"{key}: {mistake['msg'].removeprefix('Value error, ')}")
        else:
            expected = mistake["msg"].replace("Input", "it").partition(" or instance of")[0]
            lines.append(f"{key} is {shown(mistake['input'])}: {expected}")
    more = f"; and {len(mistakes) - MAX_MISTAKES} more" if len(mistakes) > MAX_MISTAKES else ""
    message = f"{file}: {'; '.join(lines)}{more}. Correct the file, or use another one."
    raise CheckpointError(printable(message))


def printable(text: str) -> str:
    """Return a text with its lone surrogates escaped: terminals cannot print them."""
    return text.encode(errors="backslashreplace").decode()


def shown(value: object) -> str:
    """Return a value of a file for a message."""
    text = repr(value) if not isinstance(value, int) or abs(value) < 1 << 64 else "a number beyond 64 bits"
    return text if len(text) <= SHOWN else text[:SHOWN] + "..."
