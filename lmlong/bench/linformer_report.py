"""The costs of Linformer and of full attention as tables, as plain values and as a chart."""

import math
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from lmlong.bench.linformer import FULL, Cost, Measured
from lmlong.bench.linformer_grid import Grid
from lmlong.charts import COLOURS, LINES, MARKERS, clear, name_places

TITLES = {"attention": "attention alone", "layer": "whole layer"}


def table(grid: Grid, machine: str, found: Sequence[Measured]) -> str:
    """For an 80-column terminal: ratios to full attention, and below them what they are made of."""
    lines = [
        f"Linformer of k slots against full attention, {grid.rows} row{'' if grid.rows == 1 else 's'} of n tokens,",
        f"width {grid.width}, {grid.heads} heads, float32, without gradients, on",
        machine,
    ]
    for part, measured in groupby(found, key=lambda each: each.part):
        lines += ["", TITLES[part], *_part(grid, list(measured))]
    lines += ["", *_notes(grid, found)]
    return "\n".join(lines)


def _part(grid: Grid, measured: Sequence[Measured]) -> list[str]:
    slots = [str(count) for count in grid.slots]
    names = [FULL, *slots]
    lines = [
        f"{'':7}{'times as fast as full':^{7 * len(slots)}}   {'rows in the same memory*':^{7 * len(names)}}".rstrip(),
        f"n   k ={_cells(slots, 7)}   {_cells(names, 7)}",
    ]
    for each in measured:
        speeds = [_number(each.times_as_fast(name)) if name in each.costs else "" for name in slots]
        rows = [_number(each.rows(name)) if name in each.costs else _missing(name) for name in names]
        lines.append(f"{each.length:>7,}{_cells(speeds, 7)}   {_cells(rows, 7)}")
    lines += ["", f"{'':7}microseconds a token, and half of what lies between the quartiles"]
    lines.append(f"n   k ={_cells(names, 14)}")
    for each in measured:
        cells = [_a_token(each.costs[name], each.length) if name in each.costs else _missing(name) for name in names]
        lines.append(f"{each.length:>7,}{_cells(cells, 14)}")
    return lines


def _notes(grid: Grid, found: Sequence[Measured]) -> list[str]:
    rounds = sorted({len(cost.seconds) for each in found for cost in each.costs.values()})
    spread = str(rounds[0]) if len(rounds) == 1 else f"{rounds[0]} to {rounds[-1]}"
    lines = [
        f"times are medians of {spread} rounds, in each of which all have their turn",
        "* as one row of full attention that holds all its n x n weights, which `full`",
        "  as torch computes it never does; of a row's inputs and all made from them",
    ]
    if any(FULL not in each.costs for each in found):
        lines.append(f"- left out: a pass would take longer than {grid.limit:g} seconds (--limit)")
    return lines


def _cells(cells: Sequence[str], width: int) -> str:
    return "".join(f"{cell:>{width}}" for cell in cells)


def _missing(name: str) -> str:
    """Full attention was left out; more slots than tokens are no shortening."""
    return "-" if name == FULL else ""


def _number(ratio: float) -> str:
    decimals = 2 if ratio < 10 else 1 if ratio < 100 else 0
    return "-" if math.isnan(ratio) else f"{ratio:,.{decimals}f}"


def _a_token(cost: Cost, length: int) -> str:
    lower, median, upper = cost.quartiles
    return f"{median / length * 1e6:,.1f} ±{(upper - lower) / 2 / median:>3.0%}"


def plain(grid: Grid, machine: str, found: Sequence[Measured]) -> dict[str, Any]:
    """All seconds and bytes, and the ratios made of them; null where there is no number."""
    return {**grid._asdict(), "machine": machine, "measured": [_plain(each) for each in found]}


def _plain(each: Measured) -> dict[str, Any]:
    return {
        "part": each.part,
        "length": each.length,
        "matrix_row_bytes": each.matrix_row_bytes,
        "costs": [
            {
                "attention": name if name == FULL else "linformer",
                "slots": None if name == FULL else int(name),
                **cost._asdict(),
                "times_as_fast": None if FULL not in each.costs else each.times_as_fast(name),
                "rows": each.rows(name),
            }
            for name, cost in each.costs.items()
        ],
    }


def draw(grid: Grid, found: Sequence[Measured], path: Path) -> None:
    """Time a token against length into an image file, a panel for the attention alone and one for its layer."""
    figure(grid, found).savefig(path, dpi=160)


def figure(grid: Grid, found: Sequence[Measured]) -> Figure:
    """A line that stays level costs as much for each token of a long text as of a short one."""
    drawn = Figure(figsize=(9.2, 4.4), layout="constrained")
    panels = drawn.subplots(1, 2, sharey=True)
    for axes, (part, grouped) in zip(panels, groupby(found, key=lambda each: each.part), strict=True):
        measured = list(grouped)
        for number, name in enumerate([FULL, *map(str, grid.slots)]):
            there = [each for each in measured if name in each.costs]
            lengths = [each.length for each in there]
            low, middle, high = (
                [each.costs[name].quartiles[q] / each.length * 1e6 for each in there] for q in range(3)
            )
            look = number % len(COLOURS)
            axes.plot(
                lengths,
                middle,
                color=COLOURS[look],
                marker=MARKERS[look],
                markeredgecolor="white",
                markersize=7,
                linestyle=LINES[look],
                label=name if name == FULL else f"k = {name}",
            )
            axes.fill_between(lengths, low, high, color=COLOURS[look], alpha=0.15, linewidth=0)
        name_places(axes, [each.length for each in measured], lambda length: f"{length:,}")
        axes.set_title(TITLES[part])
        axes.set_xlabel("tokens")
        clear(axes)
    panels[0].set_yscale("log")
    panels[0].yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    panels[0].yaxis.set_major_formatter("{x:,.0f}")
    panels[0].yaxis.set_minor_locator(NullLocator())
    panels[0].set_ylabel("microseconds a token, with quartiles")
    drawn.legend(*panels[0].get_legend_handles_labels(), loc="outside upper left", ncols=6, frameon=False)
    return drawn
