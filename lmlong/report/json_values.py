"""Results as values that JSON can hold."""

import dataclasses
import math
from collections.abc import Callable
from operator import attrgetter
from typing import Any, TypeVar

Result = TypeVar("Result")


def json_keys(*keys: str) -> Callable[[type[Result]], type[Result]]:
    """Declare the keys of a result in JSON.

    Each is the name of a field or property, "key=path.of.attributes", or "*path" for all keys of the result at a path.
    """

    def declare(cls: type[Result]) -> type[Result]:
        cls.JSON = keys  # type: ignore[attr-defined]
        return cls

    return declare


def json_values(value: Any) -> Any:
    """Return a result in dicts, lists, strings and numbers.

    NamedTuples and dataclasses become dicts of their fields, or of the keys that `json_keys` declares. Arrays become
    lists; nan and the infinities, which JSON lacks, null.
    """
    if hasattr(value, "JSON"):
        return declared(value, value.JSON)
    if hasattr(value, "_asdict"):
        return json_values(value._asdict())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: json_values(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {key: json_values(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [json_values(each) for each in value]
    if hasattr(value, "tolist"):  # an array or a number of NumPy
        return json_values(value.tolist())
    return None if isinstance(value, float) and not math.isfinite(value) else value


def declared(value: Any, keys: tuple[str, ...]) -> dict[str, Any]:
    """Return the declared keys of a result with their values."""
    values: dict[str, Any] = {}
    for key, _, path in (key.partition("=") for key in keys):
        if key.startswith("*"):
            values |= json_values(attrgetter(key[1:])(value))
        else:
            values[key] = json_values(attrgetter(path or key)(value))
    return values
