"""The comparison of attentions as a table and as JSON."""

import statistics
from collections.abc import Sequence
from typing import Any

from lmlong.experiments.compare import CandidateResult, ComparedRun
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
    for result in sorted(results, key=lambda result: result.mean):
        run = result.runs[0]
        speed = statistics.median(run.tokens_per_second for run in result.runs)
        state = f"{run.state_bytes / 1024:,.0f} KiB"
        rows.append([result.name, result.mean, result.spread, run.rate, run.parameters, speed, state])
    return "\n".join(format_table(COLUMNS, rows))


def to_json(runs: Sequence[ComparedRun]) -> list[dict[str, Any]]:
    """Return all runs."""
    return json_values(runs)
