"""The usual run's share of a grid."""

from itertools import product

import pytest
from grids import every_nth, thinned

numbers = pytest.mark.parametrize("number", range(6))
letters = pytest.mark.parametrize(("letter", "again"), [("a", "A"), ("b", "B")], ids=lambda letter: letter)
colours = pytest.mark.parametrize("colour", [pytest.param("red", marks=pytest.mark.gpu), "green", "blue"])


def test_each_value_is_in_the_usual_run() -> None:
    names, points = thinned(letters, numbers, colours).args
    assert names == ["letter", "again", "number", "colour"]
    assert [point.values for point in points] == [
        (*letter, number, colour)
        for letter, number, colour in product((("a", "A"), ("b", "B")), range(6), ("red", "green", "blue"))
    ]
    assert points[0].id == "a-A-0-red"
    usual = [point for point in points if pytest.mark.slow.mark not in [mark.mark for mark in point.marks]]
    assert [point.values[2] for point in usual if point.values[0] == "a"] == [0, 2, 4]
    assert sorted({point.values[2] for point in usual}) == list(range(6)) and len(usual) == 6
    assert len({(point.values[0], point.values[3]) for point in usual}) == 6, "every pair of the shorter axes"
    assert all((pytest.mark.gpu in point.marks) == (point.values[3] == "red") for point in points)


def test_every_third_value_is_in_the_usual_run() -> None:
    name, points = every_nth(3, numbers).args
    assert name == "number"
    assert [point.values[0] for point in points if not point.marks] == [0, 3]
    assert all(point.marks == [pytest.mark.slow] for point in points if point.values[0] % 3)
