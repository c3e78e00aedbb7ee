"""The laws checked on a model as a table and as JSON."""

from typing import Any

from lmlong.evaluation.law_check import LawReport
from lmlong.report.json_values import json_values
from lmlong.report.table import Column, format_range, format_table

LAWS = [
    Column("law", 52, align="<"),
    Column("error", 9, ".1e"),
    Column("allowed", 10, ".1e"),
    Column("", 0, align="<"),
]
DENOMINATORS = [
    Column("denominators at position", 28, align="<"),
    Column("smallest", 14, ".3g"),
    Column("median", 14, ".3g"),
    Column("largest", 14, ".3g"),
]


def table(report: LawReport) -> str:
    """Return the laws, then the denominators by position, for an 80-column terminal."""
    lines = format_table(
        LAWS,
        [
            [verdict.law, verdict.measured, verdict.allowed, "  kept" if verdict.kept else "  BROKEN"]
            for verdict in report.verdicts
        ],
    )
    if report.denominators:
        rows = [[format_range(at.first, at.last), at.smallest, at.median, at.largest] for at in report.denominators]
        lines += ["", *format_table(DENOMINATORS, rows)]
    broken = sum(not verdict.kept for verdict in report.verdicts)
    text = f"{report.rows} rows of {report.tokens:,} tokens, computed in {report.precision}"
    lines += ["", f"{broken} of {len(report.verdicts)} laws broken" if broken else "all laws kept", text]
    return "\n".join(lines)


def to_json(report: LawReport) -> dict[str, Any]:
    """Return the verdicts and the denominators."""
    return json_values(
        {
            "kept": report.kept,
            "precision": report.precision,
            "rows": report.rows,
            "tokens": report.tokens,
            "laws": [{**verdict._asdict(), "kept": verdict.kept} for verdict in report.verdicts],
            "denominators": report.denominators,
        }
    )
