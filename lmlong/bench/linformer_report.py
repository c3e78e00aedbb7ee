"""Time and memory of Linformer and of full attention as tables, as JSON and as a plot."""

from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

from lmlong.bench.linformer_grid import LinformerGrid
from lmlong.bench.linformer_speed import FULL, LinformerCost, LinformerResult
from lmlong.report.figure import Figure, Panel, lines_of
from lmlong.report.json_values import json_values
from lmlong.report.table import Column, format_table, pivot_rows, plural, three_digits

TITLES = {"attention": "attention alone", "layer": "whole layer"}


def table(grid: LinformerGrid, machine: str, results: Sequence[LinformerResult]) -> str:
    """Return for an 80-column terminal the ratios to full attention, and below them the times."""
    lines = [
        f"Linformer of k slots against full attention, {plural(grid.rows, 'row')} of n tokens,",
        f"width {grid.width}, {grid.heads} heads, float32, without gradients, on",
        machine,
    ]
    for part, measured in groupby(results, key=lambda result: result.part):
        lines += ["", TITLES[part], *_part(grid, list(measured))]
    return "\n".join([*lines, "", *_notes(grid, results)])


def _part(grid: LinformerGrid, results: Sequence[LinformerResult]) -> list[str]:
    slots = [str(count) for count in grid.slots]
    names, lengths = [FULL, *slots], [result.length for result in results]
    measured = [(result, name) for result in results for name in result.costs]
    left_out = {(length, FULL): ("-",) for length in lengths}
    speeds = {(result.length, name): (three_digits(result.times_as_fast(name)),) for result, name in measured}
    memory = left_out | {(result.length, name): (three_digits(result.rows(name)),) for result, name in measured}
    times = left_out | {
        (result.length, name): (_per_token(result.costs[name], result.length),) for result, name in measured
    }
    first = Column("n   k =", 7, ",")
    ratios = [first, *(Column(name, 7) for name in slots), Column("   ", 3), *(Column(name, 7) for name in names)]
    pairs = zip(pivot_rows(lengths, slots, speeds), pivot_rows(lengths, names, memory), strict=True)
    heads = f"{'times as fast as full':^{7 * len(slots)}}   {'rows in the same memory*':^{7 * len(names)}}"
    return [
        f"{'':7}{heads}".rstrip(),
        *format_table(ratios, [[*speed, None, *rows] for speed, (_, *rows) in pairs]),
        "",
        f"{'':7}microseconds a token, and half of the distance between the quartiles",
        *format_table([first, *(Column(name, 14) for name in names)], pivot_rows(lengths, names, times)),
    ]


def _per_token(cost: LinformerCost, length: int) -> str:
    lower, median, upper = cost.quartiles
    return f"{median / length * 1e6:,.1f} ±{(upper - lower) / 2 / median:>3.0%}"


def _notes(grid: LinformerGrid, results: Sequence[LinformerResult]) -> list[str]:
    rounds = sorted({len(cost.seconds) for result in results for cost in result.costs.values()})
    spread = str(rounds[0]) if len(rounds) == 1 else f"{rounds[0]} to {rounds[-1]}"
    lines = [
        f"times are medians of {spread} rounds, in each of which all have their turn",
        "* as one row of full attention that holds all its n x n weights, which `full`",
        "  as torch computes it never does; of a row's inputs and all made from them",
    ]
    if any(FULL not in result.costs for result in results):
        lines.append(f"- left out: a pass would take longer than {grid.limit:g} seconds (--limit)")
    return lines


def to_json(grid: LinformerGrid, machine: str, results: Sequence[LinformerResult]) -> dict[str, Any]:
    """Return all seconds and bytes, and the ratios made of them."""
    measured = [_result_values(result) for result in results]
    return json_values({**grid._asdict(), "machine": machine, "measured": measured})


def _result_values(result: LinformerResult) -> dict[str, Any]:
    return {
        "part": result.part,
        "length": result.length,
        "matrix_row_bytes": result.matrix_row_bytes,
        "costs": [
            {
                "attention": name if name == FULL else "linformer",
                "slots": None if name == FULL else int(name),
                **cost._asdict(),
                "times_as_fast": result.times_as_fast(name),
                "rows": result.rows(name),
            }
            for name, cost in result.costs.items()
        ],
    }


def figure(grid: LinformerGrid, results: Sequence[LinformerResult]) -> Figure:
    """Return the time per token against the length, a panel for the attention alone and one for its layer.

    A horizontal line is a constant cost per token.
    """
    panels = [_panel(grid, part, list(measured)) for part, measured in groupby(results, key=lambda result: result.part)]
    return Figure([panels], size=(9.2, 4.4), share_y=True, legend_columns=6)


def _panel(grid: LinformerGrid, part: str, results: Sequence[LinformerResult]) -> Panel:
    groups = {
        name if name == FULL else f"k = {name}": [
            (result.length, *(seconds / result.length * 1e6 for seconds in result.costs[name].quartiles))
            for result in results
            if name in result.costs
        ]
        for name in (FULL, *map(str, grid.slots))
    }
    return Panel(
        lines_of(groups, itemgetter(0), itemgetter(2), band=itemgetter(1, 3)),
        title=TITLES[part],
        x_label="tokens",
        y_label="microseconds a token, with quartiles",
        ticks=[result.length for result in results],
        tick_name=lambda length: f"{length:,}",
        y_scale="log 1-2-5",
    )
