"""Planted anomalies as tables, JSON and a figure."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from lmlong.report.figure import Figure, Line, Panel, Style, style
from lmlong.report.json_values import json_values
from lmlong.report.table import Column, format_table
from planted_parts.anomalies import Found
from planted_parts.anomaly_ranking import anomalous
from planted_parts.service_log import ANOMALIES, ServiceLog

COLUMNS = [
    Column("method", 28, align="<"),
    Column("above", 9, ".1f"),
    Column("alarms", 8, ","),
    Column("precision", 11, ".2f"),
    Column("recall", 8, ".2f"),
    Column("F1", 6, ".2f"),
    Column("average", 9, ".2f"),
]
KINDS = [Column("recall by kind", 24, align="<"), *(Column(kind.split()[-1], 9, ".2f") for kind in ANOMALIES)]
POINTS = 400
"""Most points of a curve in JSON and in the figure."""


def table(found: Sequence[Found], log: ServiceLog) -> str:
    """Return what each method finds at its thresholds, the best one last, and recall by kind at that."""
    rows = [
        [each.method if number == 0 else "", *_cells(alarms), each.curve.average_precision if last else None]
        for each in found
        for number, alarms in enumerate(each.alarms)
        for last in [alarms is each.alarms[-1]]
    ]
    kinds = [[each.method[:24], *(each.alarms[-1].by_kind.get(kind) for kind in ANOMALIES)] for each in found]
    lines = int(anomalous(len(log.lines), log.planted).sum())
    head = f"{len(log.lines):,} lines, {len(log.planted)} anomalies in {lines} of them"
    return "\n".join([head, "", *format_table(COLUMNS, rows), "", *format_table(KINDS, kinds)])


def _cells(alarms: Any) -> list[Any]:
    return [alarms.above, alarms.alarms, alarms.precision, alarms.recall, alarms.f1]


def to_json(found: Sequence[Found], log: ServiceLog) -> dict[str, Any]:
    """Return the truth, and of each method its numbers and its curve."""
    methods = [
        {
            "method": each.method,
            "average_precision": each.curve.average_precision,
            "alarms": [
                {**alarms._asdict(), "precision": alarms.precision, "recall": alarms.recall, "f1": alarms.f1}
                for alarms in each.alarms
            ],
            "curve": {"precision": precision, "recall": recall},
        }
        for each in found
        for precision, recall in [_points(each)]
    ]
    return json_values({"lines": len(log.lines), "planted": log.planted, "methods": methods})


def figure(found: Sequence[Found], log: ServiceLog) -> Figure:
    """Describe precision against recall of each method, and the scores of the first along the log."""
    curves = [
        Line(each.method, recall, precision, style(number)._replace(marker=None))
        for number, each in enumerate(found)
        for precision, recall in [_points(each)]
    ]
    against = Panel(curves, "", "recall", "precision", x_range=(0, 1.02), y_range=(0, 1.02), legend=True)
    return Figure([[against], [_along(found[0], log)]], (11, 9))


def _along(found: Found, log: ServiceLog) -> Panel:
    """Describe the scores of all lines, and of each anomaly the highest of its lines."""
    place = np.arange(1, len(log.lines) + 1)
    normal = ~anomalous(len(log.lines), log.planted) & ~np.isnan(found.scores)
    lines = [Line("normal", place[normal], found.scores[normal], Style("0.6", "", "o", 3, hollow=True))]
    for number, kind in enumerate(ANOMALIES):
        some = [one for one in log.planted if one.kind == kind]
        highest = [float(np.nanmax(found.scores[one.first - 1 : one.last])) for one in some]
        lines.append(Line(kind, [one.first for one in some], highest, style(number)._replace(dashes="")))
    return Panel(lines, f"{found.method}: z of each line", "line", "z", legend=True)


def _points(found: Found) -> tuple[np.ndarray, np.ndarray]:
    """Return precision and recall at a number of thresholds, at each further anomaly among them."""
    curve = found.curve
    new = np.flatnonzero(np.diff(curve.recall, prepend=0) > 0)
    some = np.linspace(0, len(curve.above) - 1, min(POINTS, len(curve.above))).astype(int)
    kept = np.unique(np.concatenate([new, some]))
    return curve.precision[kept], curve.recall[kept]
