"""Perplexity on hidden tokens as a table and as JSON."""

from collections.abc import Sequence
from typing import Any

from lmlong.evaluation.masked import MaskedReport
from lmlong.report.json_values import json_values
from lmlong.report.table import Column, format_table

ERROR = Column("±", 9, ".4f")
COLUMNS = [
    Column("", 24, align="<"),
    Column("perplexity", 12, ".3f"),
    ERROR,
    Column("nats/token", 12, ".4f"),
    ERROR,
    Column("hidden", 10, ","),
    Column("  over", 0, align="<"),
]


def table(reports: Sequence[MaskedReport]) -> str:
    """Return a line for each encoder."""
    rows = []
    for report in reports:
        sums, totals = report.sums, report.sums.totals
        over = f"  {sums.documents:,} {report.rows}, precision {report.precision}"
        perplexity, nats = (totals.perplexity, report.error), (totals.nats_per_token, sums.nats_error)
        rows.append([report.name[-23:], *perplexity, *nats, totals.tokens, over])
    return "\n".join(format_table(COLUMNS, rows))


def to_json(reports: Sequence[MaskedReport]) -> dict[str, Any]:
    """Return the sizes, the options and the ratios of each encoder."""
    return json_values({"runs": [_report_values(report) for report in reports]})


def _report_values(report: MaskedReport) -> dict[str, Any]:
    totals = report.sums.totals
    return {
        "name": report.name,
        "checkpoint": report.checkpoint,
        "objective": "masked",
        "parameters": report.parameters,
        "trained_length": report.length,
        "precision": report.precision,
        "hidden_share": report.share,
        "hidden_tokens": totals.tokens,
        report.rows: report.sums.documents,
        "nats_per_token": totals.nats_per_token,
        "nats_per_token_error": report.sums.nats_error,
        "perplexity": totals.perplexity,
        "perplexity_error": report.error,
    }
