"""Results as values that JSON can hold."""

import dataclasses
import math
from typing import Any


def json_values(value: Any) -> Any:
    """Return a result in dicts, lists, strings and numbers.

    NamedTuples and dataclasses become dicts, arrays become lists; nan and the infinities, which JSON lacks, null.
    """
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
