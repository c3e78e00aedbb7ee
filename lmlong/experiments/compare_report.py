"""The comparison of attentions as a table, a plot and JSON."""

import statistics
from collections.abc import Sequence
from typing import Any

from lmlong.experiments.compare import CandidateResult, ComparedRun
from lmlong.report.figure import Figure, Line, Panel, style
from lmlong.report.json_values import json_values
from lmlong.report.table import Column, format_table

COLUMNS = [
    Column("attention", 20, align="<"),
    Column("bits/byte", 10, ".4f"),
    Column("spread", 9, ".4f"),
    Column("rate", 9, "g"),
    Column("parameters", 12, ","),
    Column("tokens/s", 10, ",.0f"),
    Column("state", 10),
]


def table(results: Sequence[CandidateResult]) -> str:
    """Return a line for each candidate, the best first, for an 80-column terminal."""
    rows = []
    for result in _best_first(results):
        run = result.runs[0]
        speed = statistics.median(run.tokens_per_second for run in result.runs)
        rows.append([result.name, result.mean, result.spread, run.rate, run.parameters, speed, _state(result)])
    return "\n".join(format_table(COLUMNS, rows))


def figure(results: Sequence[CandidateResult]) -> Figure:
    """Describe a line for each candidate, the best on top: a point for each seed, and their mean."""
    ranked = _best_first(results)
    seed = style(0)._replace(dashes="", marker_size=6)
    mean = style(1)._replace(dashes="", marker="D", marker_size=11, hollow=True)
    of_seeds = [(run.bits_per_byte, row) for row, result in enumerate(ranked) for run in result.runs]
    x, y = zip(*of_seeds, strict=True)
    means = [result.mean for result in ranked]
    panel = Panel(
        [Line("mean", means, range(len(ranked)), mean), Line("one seed", x, y, seed)],
        x_label="bits per byte, less is better",
        y_names=[f"{result.name}, {_state(result)}" for result in ranked],
        legend=True,
    )
    return Figure([[panel]], size=(8.0, 1.2 + 0.32 * len(ranked)))


def _best_first(results: Sequence[CandidateResult]) -> list[CandidateResult]:
    return sorted(results, key=lambda result: result.mean)


def _state(result: CandidateResult) -> str:
    return f"{result.runs[0].state_bytes / 1024:,.0f} KiB"


def to_json(runs: Sequence[ComparedRun]) -> list[dict[str, Any]]:
    """Return all runs."""
    return json_values(runs)
