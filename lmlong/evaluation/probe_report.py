"""Accuracy of probes by distance as a table, as JSON and as a plot."""

import math
from collections.abc import Sequence
from typing import Any

from lmlong.evaluation.probe_accuracy import ProbeResult, ProbeScore
from lmlong.recipe.lengths import name_length
from lmlong.report.figure import Figure, Level, Line, Panel, Style, style
from lmlong.report.json_values import json_values
from lmlong.report.table import Column, format_number, format_table


def table(results: Sequence[ProbeResult]) -> str:
    """Return the models under one another, a column for each probe."""
    return "\n\n".join(map(_section, results))


def _section(result: ProbeResult) -> str:
    probes = list(dict.fromkeys(score.probe for score in result.scores))
    distances = list(dict.fromkeys(score.distance for score in result.scores))
    found = {(score.probe, score.distance): score for score in result.scores}
    columns = [Column("distance", 10)]
    for probe in probes:
        columns += [Column(probe, 10, ".3f"), Column("±", 4)]
    rows = [
        [name_length(distance), *(cell for probe in probes for cell in _cells(found[probe, distance]))]
        for distance in distances
    ]
    # guessing is as hard at any distance, so its level is told from the texts of all
    rows.append(["chance", *(cell for probe in probes for cell in (format_number(_chance(result, probe), ".4f"), ""))])
    texts = f"{len(result.scores[0].asked):,} texts each"
    title = f"  how often the likeliest token is the right one, in {texts}"
    return "\n".join([result.name, title, *format_table(columns, rows)])


def _cells(score: ProbeScore) -> tuple[float, str]:
    return score.accuracy, format_number(score.error, ".2f").removeprefix("0")


def _chance(result: ProbeResult, probe: str) -> float:
    """Return the level of chance of a probe, of the texts at all distances."""
    known = [score.chance for score in result.scores if score.probe == probe and not math.isnan(score.chance)]
    return sum(known) / len(known) if known else math.nan


def to_json(results: Sequence[ProbeResult]) -> dict[str, Any]:
    """Return counts, and the ratios made of them."""
    return json_values(
        {
            "runs": [
                {
                    "run": result.name,
                    "trained_length": result.trained_length,
                    "recall": [
                        {
                            "probe": score.probe,
                            "distance": score.distance,
                            "texts": len(score.asked),
                            "asked": int(score.asked.sum()),
                            "right": int(score.right.sum()),
                            "accuracy": score.accuracy,
                            "error": score.error,
                            "chance": score.chance,
                        }
                        for score in result.scores
                    ],
                }
                for result in results
            ]
        }
    )


def figure(results: Sequence[ProbeResult]) -> Figure:
    """Describe accuracy against distance, a panel for each probe."""
    scores = [score for result in results for score in result.scores]
    probes = list(dict.fromkeys(score.probe for score in scores))
    distances = sorted({score.distance for score in scores})
    panels = [
        Panel(
            [_line(result, probe, number) for number, result in enumerate(results)],
            title=probe,
            x_label="tokens back",
            y_label="" if place else "accuracy, ± 2 standard errors",
            ticks=distances,
            tick_name=name_length,
            y_range=(-0.03, 1.03),
            levels=[_chance_level(results[0], probe)],
        )
        for place, probe in enumerate(probes)
    ]
    return Figure([panels], size=(max(6.4, 3.2 * len(probes)), 4.0), share_y=True, legend_columns=3)


def _chance_level(result: ProbeResult, probe: str) -> Level:
    return Level(_chance(result, probe), Style("0.5", (0, (1, 2))), text="chance", width=1)


def _line(result: ProbeResult, probe: str, number: int) -> Line:
    scores = [score for score in result.scores if score.probe == probe]
    return Line(
        result.name,
        [score.distance for score in scores],
        [score.accuracy for score in scores],
        style(number),
        errors=[2 * score.error for score in scores],
    )
