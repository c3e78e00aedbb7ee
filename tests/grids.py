"""Grids of parameters, of which the usual run takes a few points and `pytest -m slow` the rest."""

from itertools import product
from math import lcm
from typing import Any

import pytest


def thinned(*axes: pytest.MarkDecorator) -> pytest.MarkDecorator:
    """Return one `parametrize` for the product of several, in place of all of them: `@thinned(every_form, each_type)`.

    One point for each value of the longest axis stays in the usual run; all others are marked slow. Along the longest
    axis the other axes take turns, so that every value of every axis is used, and as many pairs of values as there is
    room for. Which points stay follows from the order of the values alone.
    """
    points = [_points(axis) for axis in axes]
    usual = _usual([len(each) for each in points])
    names = [name for axis in axes for name in _names(axis)]
    return pytest.mark.parametrize(
        names if len(names) > 1 else names[0],
        [
            pytest.param(
                *(value for point in chosen for value in point.values),
                marks=[mark for point in chosen for mark in point.marks] + ([] if at in usual else [pytest.mark.slow]),
                id="-".join(str(point.id) for point in chosen),
            )
            for at, chosen in zip(product(*(range(len(each)) for each in points)), product(*points), strict=True)
        ],
    )


def every_nth(n: int, axis: pytest.MarkDecorator) -> pytest.MarkDecorator:
    """Return a `parametrize` of which every n-th value, the first among them, stays in the usual run."""
    points = _points(axis)
    names = _names(axis)
    for number, point in enumerate(points):
        if number % n:
            points[number] = point._replace(marks=[*point.marks, pytest.mark.slow])
    return pytest.mark.parametrize(names if len(names) > 1 else names[0], points)


def _usual(sizes: list[int]) -> set[tuple[int, ...]]:
    """Return the points of a grid that stay in the usual run, as the index of each axis.

    The other axes are walked along diagonals, each of which shows every value of each of them, and the next of which
    is shifted: (0, 0), (1, 1), (0, 2), (1, 0), ... of a grid of 2 by 3.
    """
    longest = max(range(len(sizes)), key=sizes.__getitem__)
    others = [size for axis, size in enumerate(sizes) if axis != longest]
    walk = list(
        dict.fromkeys(
            tuple((step + shift) % size for shift, size in zip(shifts, others, strict=True))
            for shifts in product(*map(range, others))
            for step in range(lcm(*others))
        )
    )
    usual = set()
    for value in range(sizes[longest]):
        rest = list(walk[value % len(walk)])
        usual.add((*rest[:longest], value, *rest[longest:]))
    return usual


def _names(axis: pytest.MarkDecorator) -> list[str]:
    names = axis.args[0]
    return [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)


def _points(axis: pytest.MarkDecorator) -> list[Any]:
    """Return the values of a `parametrize`, each a `pytest.param` with an id."""
    single, ids = len(_names(axis)) == 1, axis.kwargs.get("ids") or _id
    points = []
    for number, value in enumerate(axis.args[1]):
        point = value if isinstance(value, type(pytest.param())) else pytest.param(*([value] if single else value))
        of_values = "-".join(str(ids(each)) for each in point.values) if callable(ids) else list(ids)[number]
        points.append(point._replace(id=point.id or of_values))
    return points


def _id(value: Any) -> str:
    return str(getattr(value, "__name__", value))
