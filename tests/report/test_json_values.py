"""Results as JSON."""

import dataclasses
import json
import math
from typing import NamedTuple

import numpy as np

from lmlong.report.json_values import json_keys, json_values


class Point(NamedTuple):
    x: int
    y: float


@dataclasses.dataclass
class Curve:
    name: str
    points: list[Point]


@json_keys("run=name", "*last", "x=curve.points", "total")
class Run(NamedTuple):
    name: str
    curve: Curve
    right: list[int]

    @property
    def last(self) -> Point:
        return self.curve.points[-1]

    @property
    def total(self) -> int:
        return sum(self.right)


def test_results_become_plain_values_and_what_is_no_number_becomes_null() -> None:
    curve = Curve("a", [Point(1, math.nan), Point(2, math.inf), Point(3, 0.5)])
    values = json_values({"curve": curve, "rows": np.array([[1.0, np.nan]]), "count": np.int64(3), "none": None})
    points = [{"x": 1, "y": None}, {"x": 2, "y": None}, {"x": 3, "y": 0.5}]
    assert values == {"curve": {"name": "a", "points": points}, "rows": [[1.0, None]], "count": 3, "none": None}
    assert json.loads(json.dumps(values, allow_nan=False)) == values


def test_a_class_declares_its_keys_as_fields_properties_paths_and_all_keys_of_a_part() -> None:
    run = Run("a", Curve("b", [Point(1, 0.5)]), [1, 2])
    assert json_values([run]) == [{"run": "a", "x": [{"x": 1, "y": 0.5}], "y": 0.5, "total": 3}]
