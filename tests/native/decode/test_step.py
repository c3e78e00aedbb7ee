"""Constants of the native decode step."""

import pytest

from lmlong.attention.delta.layer import DeltaDecode
from lmlong.attention.ngram.layer import NgramDecode
from lmlong.native.decode.step import merged_constants


def test_constants_of_the_same_name_and_another_value_are_refused() -> None:
    """A shared name would otherwise silently give one kind the other's value."""
    kinds = [DeltaDecode(), NgramDecode()]
    merged = merged_constants({"RMS_EPS": 0.5}, kinds)
    assert merged["RMS_EPS"] == 0.5 and kinds[0].constants.items() <= merged.items()
    name, value = next(iter(DeltaDecode.constants.items()))
    assert merged_constants({name: value}, kinds)[name] == value
    with pytest.raises(AssertionError, match=f"{name} is {value}, but"):
        merged_constants({name: value + 1}, kinds)
