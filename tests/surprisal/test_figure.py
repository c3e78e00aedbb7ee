"""The picture of a text of any length keeps its bits, and marks the most unusual units apart from each other."""

import random

import numpy as np
import pytest

from lmlong.report.figure import Panel
from lmlong.surprisal.figure import APART, MARKED, STRETCHES, SurpriseAlong
from lmlong.surprisal.units import Surprise


def units(count: int) -> list[Surprise]:
    draw = random.Random(0)
    found, place = [], 0
    for number in range(1, count + 1):
        size, z = draw.randint(1, 80), None if number < 30 else draw.uniform(-2, 9)
        found.append(Surprise("text", number, place, size, 3, float(size), 1.0, z, f"line of words {number}\n"))
        place += size
    return found


def panels(along: SurpriseAlong) -> list[Panel]:
    return [panel for row in along.figure("run").rows for panel in row if isinstance(panel, Panel)]


@pytest.mark.parametrize("count", [40, 5000])
def test_curve_has_all_bits(count: int) -> None:
    along, drawn = SurpriseAlong(), units(count)
    for unit in drawn:
        along.add(unit)
    panel, below = panels(along)
    assert len(panel.lines[0].x) <= STRETCHES
    assert np.array(panel.lines[0].y) == pytest.approx(1.0)  # as each byte has one bit
    places = [mark.x * 1000 for mark in below.marks]
    assert 1 < len(places) <= MARKED
    assert min(abs(a - b) for a in places for b in places if a != b) * APART >= drawn[-1].offset
    most = max(drawn, key=lambda unit: unit.z or 0.0)
    assert places[0] == pytest.approx(most.offset) and f"1  {most.text.strip()}\n" in f"{below.note}\n"


def test_empty_lines_are_not_marked() -> None:
    along, drawn = SurpriseAlong(), units(200)
    assert not panels(along)[1].marks, "of an empty text"
    drawn[100] = drawn[100]._replace(z=99.0, text="\n")
    for unit in drawn:
        along.add(unit)
    told = panels(along)[1].note.splitlines()
    assert told and all("line of words" in line for line in told)
