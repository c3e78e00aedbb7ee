"""The results of a contest as tables, as plain values and as a chart."""

import math
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from lmlong.bench.contest import Result
from lmlong.charts import COLOURS, LINES, MARKERS, clear, name_places
from lmlong.lengths import name_length

AGAINST = "softmax"
COLUMNS = 5
"""Contestants side by side in a terminal of 80 columns."""

Cell = Callable[[Result], str]


class Title(NamedTuple):
    """What a contest was about."""

    work: str
    machine: str
    memory: str  # what the bytes are
    bytes: Callable[[Result], float]  # in the unit that the line above names


def table(title: Title, results: Sequence[Result]) -> str:
    """For an 80-column terminal: ratios to softmax, the speeds they are made of, and memory."""
    lines = [title.work, f"on {title.machine}"]
    for precision, of_precision in groupby(results, key=lambda one: one.precision):
        measured = list(of_precision)
        if any(one.name == AGAINST for one in measured):
            lines += ["", f"in {precision}, times as fast as {AGAINST}"]
            ratios = {(one.name, one.length): ratio(measured, one) for one in measured}
            lines += _grid(measured, lambda one: _number(ratios[one.name, one.length]), crossovers(measured))  # noqa: B023
        lines += ["", f"in {precision}, tokens/s, and half of what lies between the quartiles"]
        lines += _grid(measured, _speed)
        lines += ["", f"in {precision}, {title.memory}"]
        lines += _grid(measured, lambda one: _number(title.bytes(one)))
    rounds = sorted({len(one.seconds) for one in results})
    lines += ["", f"medians of {rounds[0]} to {rounds[-1]} rounds, in each of which all have their turn"]
    if len({(one.name, one.length) for one in results}) < len(_names(results)) * len(_lengths(results)):
        lines.append("- left out: a pass would take longer than --limit")
    return "\n".join(lines)


def ratio(results: Sequence[Result], one: Result) -> float:
    """How many times as fast as softmax at the same length; nan where that was left out."""
    other = [r for r in results if (r.name, r.precision, r.length) == (AGAINST, one.precision, one.length)]
    return one.speeds[1] / other[0].speeds[1] if other else math.nan


def crossovers(results: Sequence[Result]) -> dict[str, str]:
    """From which length on each contestant is faster than softmax, between the measured ones on a straight line of
    logarithms; in one number format."""
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


def _grid(results: Sequence[Result], cell: Cell, last: dict[str, str] | None = None) -> list[str]:
    """A row for each length, a column for each contestant, and one more row."""
    lines = []
    names, found = _names(results), {(one.name, one.length): one for one in results}
    for begin in range(0, len(names), COLUMNS):
        some = names[begin : begin + COLUMNS]
        lines.append("tokens".rjust(8) + "".join(f"{name:>14}" for name in some))
        for length in _lengths(results):
            cells = [cell(found[name, length]) if (name, length) in found else "-" for name in some]
            lines.append(f"{length:>8,}" + "".join(f"{text:>14}" for text in cells))
        if last:
            lines.append("faster >".rjust(8) + "".join(f"{last[name]:>14}" for name in some))
    return lines


def _names(results: Sequence[Result]) -> list[str]:
    return list(dict.fromkeys(one.name for one in results))


def _lengths(results: Sequence[Result]) -> list[int]:
    return sorted({one.length for one in results})


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:,.{2 if value < 10 else 1 if value < 100 else 0}f}"


def _speed(one: Result) -> str:
    low, middle, high = one.speeds
    return f"{middle:,.0f} ±{(high - low) / 2 / middle:>3.0%}"


def plain(title: Title, settings: dict[str, Any], results: Sequence[Result]) -> dict[str, Any]:
    """All seconds and bytes, the ratios made of them and the lengths from which on softmax is slower."""
    by_precision = {key: list(of) for key, of in groupby(results, key=lambda one: one.precision)}
    return {
        "work": title.work,
        "machine": title.machine,
        **settings,
        "results": [
            {**one._asdict(), "tokens_per_second": one.speeds[1], "ratio": _json(ratio(results, one))}
            for one in results
        ],
        "faster_from": {precision: crossovers(measured) for precision, measured in by_precision.items()},
    }


def _json(value: float) -> float | None:
    return None if math.isnan(value) else value


def _in_full(speed: float, _: int) -> str:
    """A speed beside an axis, where few enough fit: 1,000 and not a power of ten."""
    digits = f"{speed:.0f}"
    return f"{speed:,.0f}" if digits[0] in "125" and not digits[1:].strip("0") else ""


def draw(title: Title, results: Sequence[Result], path: Path) -> None:
    """Tokens per second against length, both on log scales, a panel for each number format."""
    precisions = list(dict.fromkeys(one.precision for one in results))
    drawn = Figure(figsize=(4.8 * len(precisions) + 0.8, 4.4), layout="constrained")
    panels = drawn.subplots(1, len(precisions), sharey=True, squeeze=False)[0]
    for axes, precision in zip(panels, precisions, strict=True):
        for number, name in enumerate(_names(results)):
            line = [one for one in results if (one.name, one.precision) == (name, precision)]
            look = number % len(COLOURS)
            low, middle, high = ([one.speeds[quartile] for one in line] for quartile in range(3))
            lengths = [one.length for one in line]
            axes.plot(
                lengths,
                middle,
                color=COLOURS[look],
                marker=MARKERS[look],
                markeredgecolor="white",
                linestyle=LINES[look],
                label=name,
            )
            axes.fill_between(lengths, low, high, color=COLOURS[look], alpha=0.15, linewidth=0)
        name_places(axes, _lengths(results), name_length)
        axes.set_yscale("log")
        for ticks in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
            ticks(FuncFormatter(_in_full))
        axes.set_title(precision)
        axes.set_xlabel("tokens")
        clear(axes)
    panels[0].set_ylabel("tokens/s, with quartiles")
    drawn.legend(*panels[0].get_legend_handles_labels(), loc="outside upper left", ncols=5, frameon=False)
    drawn.savefig(path, dpi=160)
