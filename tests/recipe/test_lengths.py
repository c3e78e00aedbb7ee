"""Lengths as people write them."""

import pytest

from lmlong.errors import UsageError
from lmlong.recipe.lengths import name_length, parse_lengths


@pytest.mark.parametrize(
    ("text", "lengths"),
    [
        ("256", [256]),
        ("1M,2m", [1 << 20, 2 << 20]),
        ("256,1k,4k,16k", [256, 1024, 4096, 16_384]),
        ("4K, 1k,1024 ,7", [7, 1024, 4096]),
        ("007", [7]),
    ],
)
def test_lengths_are_read_once_each_shortest_first(text: str, lengths: list[int]) -> None:
    assert parse_lengths(text) == lengths


@pytest.mark.parametrize(
    ("text", "bad"), [("", ""), ("256,", ""), ("1k,0", "0"), ("-5", "-5"), ("1.5k", "1.5k"), ("1t", "1t"), ("²", "²")]
)
def test_what_is_no_length_is_named(text: str, bad: str) -> None:
    with pytest.raises(UsageError, match=f"^--lengths: '{bad}' is not a length"):
        parse_lengths(text)


@pytest.mark.parametrize("name", ["1", "256", "1000", "1k", "1536", "16k", "1m", "1025k", "3m", "2g"])
def test_a_name_is_read_back_as_itself(name: str) -> None:
    (length,) = parse_lengths(name)
    assert name_length(length) == name
