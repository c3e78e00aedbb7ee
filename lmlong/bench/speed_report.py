"""The results of a speed benchmark as tables, as JSON and as a plot."""

import math
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from lmlong.bench.speed import Result
from lmlong.recipe.lengths import name_length
from lmlong.report.figure import Figure, Line, Panel, style
from lmlong.report.json_values import json_values
from lmlong.report.table import Cell, Column, format_table, three_digits

AGAINST = "softmax"
COLUMNS = 5
"""Candidates side by side in a terminal of 80 columns."""

Format = Callable[[Result], str]


class Title(NamedTuple):
    """The description of a benchmark."""

    work: str
    machine: str
    memory: str  # the meaning and unit of the bytes
    bytes: Callable[[Result], float]  # in the unit that `memory` names


def table(title: Title, results: Sequence[Result]) -> str:
    """Return for an 80-column terminal the ratios to softmax, the speeds, and the memory."""
    lines = [title.work, f"on {title.machine}"]
    for precision, of_precision in groupby(results, key=lambda one: one.precision):
        measured = list(of_precision)
        if any(one.name == AGAINST for one in measured):
            lines += ["", f"in {precision}, times as fast as {AGAINST}"]
            ratios = {(one.name, one.length): ratio(measured, one) for one in measured}
            lines += _grid(measured, lambda one: three_digits(ratios[one.name, one.length]), crossovers(measured))  # noqa: B023
        lines += ["", f"in {precision}, tokens/s, and half of what lies between the quartiles"]
        lines += _grid(measured, _speed)
        lines += ["", f"in {precision}, {title.memory}"]
        lines += _grid(measured, lambda one: three_digits(title.bytes(one)))
    rounds = sorted({len(one.seconds) for one in results})
    lines += ["", f"medians of {rounds[0]} to {rounds[-1]} rounds, in each of which all have their turn"]
    if len({(one.name, one.length) for one in results}) < len(_names(results)) * len(_lengths(results)):
        lines.append("- left out: a pass would take longer than --limit")
    return "\n".join(lines)


def ratio(results: Sequence[Result], one: Result) -> float:
    """Return the speed relative to softmax at the same length; nan where that was left out."""
    other = [r for r in results if (r.name, r.precision, r.length) == (AGAINST, one.precision, one.length)]
    return one.speeds[1] / other[0].speeds[1] if other else math.nan


def crossovers(results: Sequence[Result]) -> dict[str, str]:
    """Return from which length on each candidate is faster than softmax, in one number format; between the measured
    lengths it is interpolated on log scales."""
    found = {}
    for name in _names(results):
        points = [(one.length, ratio(results, one)) for one in results if one.name == name]
        points = [(length, value) for length, value in points if not math.isnan(value)]
        found[name] = "" if name == AGAINST or not points else _crossover(points)
    return found


def _crossover(points: Sequence[tuple[int, float]]) -> str:
    if points[-1][1] < 1:
        return f"> {name_length(points[-1][0])}"
    below = [number for number, (_, value) in enumerate(points) if value < 1]
    if not below:
        return f"< {name_length(points[0][0])}"
    (short, slow), (long, fast) = points[below[-1]], points[below[-1] + 1]
    share = -math.log(slow) / (math.log(fast) - math.log(slow))
    return f"{short * (long / short) ** share:,.0f}"


def _grid(results: Sequence[Result], cell: Format, last: dict[str, str] | None = None) -> list[str]:
    """Return a row for each length with a column for each candidate, and perhaps one more row."""
    lines = []
    names, found = _names(results), {(one.name, one.length): one for one in results}
    for begin in range(0, len(names), COLUMNS):
        some = names[begin : begin + COLUMNS]
        columns = [Column("tokens", 8, ","), *(Column(name, 14) for name in some)]
        rows: list[list[Cell]] = [
            [length, *(cell(found[name, length]) if (name, length) in found else "-" for name in some)]
            for length in _lengths(results)
        ]
        if last:
            rows.append(["faster >", *(last[name] for name in some)])
        lines += format_table(columns, rows)
    return lines


def _names(results: Sequence[Result]) -> list[str]:
    return list(dict.fromkeys(one.name for one in results))


def _lengths(results: Sequence[Result]) -> list[int]:
    return sorted({one.length for one in results})


def _speed(one: Result) -> str:
    low, middle, high = one.speeds
    return f"{middle:,.0f} ±{(high - low) / 2 / middle:>3.0%}"


def to_json(title: Title, settings: dict[str, Any], results: Sequence[Result]) -> dict[str, Any]:
    """Return all seconds and bytes, the ratios to softmax and the lengths from which on softmax is slower."""
    by_precision = {key: list(of) for key, of in groupby(results, key=lambda one: one.precision)}
    return json_values(
        {
            "work": title.work,
            "machine": title.machine,
            **settings,
            "results": [
                {**one._asdict(), "tokens_per_second": one.speeds[1], "ratio": ratio(results, one)} for one in results
            ],
            "faster_from": {precision: crossovers(measured) for precision, measured in by_precision.items()},
        }
    )


def figure(results: Sequence[Result]) -> Figure:
    """Describe tokens per second against length, both on log scales, a panel for each number format."""
    precisions = list(dict.fromkeys(one.precision for one in results))
    panels = [
        Panel(
            [_line(results, name, precision, number) for number, name in enumerate(_names(results))],
            title=precision,
            x_label="tokens",
            y_label="" if place else "tokens/s, with quartiles",
            ticks=_lengths(results),
            tick_name=name_length,
            y_scale="log 1-2-5 minor",
        )
        for place, precision in enumerate(precisions)
    ]
    return Figure([panels], size=(4.8 * len(precisions) + 0.8, 4.4), share_y=True, legend_columns=5)


def _line(results: Sequence[Result], name: str, precision: str, number: int) -> Line:
    found = [one for one in results if (one.name, one.precision) == (name, precision)]
    low, middle, high = ([one.speeds[quartile] for one in found] for quartile in range(3))
    return Line(name, [one.length for one in found], middle, style(number)._replace(marker_size=6), low, high)
