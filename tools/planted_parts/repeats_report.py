"""What second copies cost, as a table, JSON and a figure."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from lmlong.recipe.lengths import name_length
from lmlong.report.figure import Figure, Line, Panel, style
from lmlong.report.json_values import json_values
from lmlong.report.table import Column, format_table
from planted_parts.repeats import Cost, RepeatCosts

COLUMNS = [
    Column("model", 16, align="<"),
    Column("state", 11),
    Column("distance", 10),
    Column("first", 8, ".2f"),
    Column("second", 8, ".2f"),
    Column("saved", 9, ".2f"),
    Column("±", 7, ".2f"),
    Column("mutated", 9, ".2f"),
]


def table(found: Sequence[RepeatCosts]) -> str:
    """Return bits per base of first and second copies at each distance, and of second ones with mutations."""
    rows = []
    for each in found:
        exact = [cost for cost in each.costs if not cost.mutated]
        mutated = {cost.distance: cost for cost in each.costs if cost.mutated}
        for number, cost in enumerate(exact):
            of_model = [each.name, f"{each.state_bytes / 1e6:,.1f} MB"] if number == 0 else ["", ""]
            with_mutations = float(np.mean(mutated[cost.distance].second)) if cost.distance in mutated else None
            first, second = float(np.mean(cost.first)), float(np.mean(cost.second))
            distance = name_length(cost.distance)
            rows.append([*of_model, distance, first, second, cost.saved, cost.error, with_mutations])
    return "\n".join(format_table(COLUMNS, rows))


def to_json(found: Sequence[RepeatCosts], bases: int, seed: int) -> dict[str, Any]:
    """Return the bits per base of every copy."""
    return json_values({"bases": bases, "seed": seed, "models": found})


def figure(found: Sequence[RepeatCosts]) -> Figure:
    """Describe bits per base of second copies against their distance, exact ones and those with mutations."""
    panels = [_panel(found, mutated) for mutated in (False, True)]
    return Figure([panels], (11, 5), share_y=True, legend_columns=4)


def _panel(found: Sequence[RepeatCosts], mutated: bool) -> Panel:
    lines = []
    for number, each in enumerate(found):
        costs = [cost for cost in each.costs if cost.mutated == mutated]
        x = [cost.distance for cost in costs]
        label = f"{each.name}, {each.state_bytes / 1e6:,.1f} MB"
        look = style(number)
        lines.append(Line(label, x, [float(np.mean(cost.second)) for cost in costs], look, errors=_errors(costs)))
    first = found[0].costs
    mean = float(np.mean([one for cost in first if cost.mutated == mutated for one in cost.first]))
    x = sorted({cost.distance for cost in first})
    lines.append(Line(f"first copies, {found[0].name}", x, [mean] * len(x), style(4)._replace(marker=None, dashes=":")))
    title = "second copies, with mutations" if mutated else "second copies, exact"
    return Panel(lines, title, "bases between the copies", "bits per base", x, name_length, y_range=(0, None))


def _errors(costs: Sequence[Cost]) -> list[float]:
    return [float(np.std(cost.second, ddof=1) / len(cost.second) ** 0.5) for cost in costs]
