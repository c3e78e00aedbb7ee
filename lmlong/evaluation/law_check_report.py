"""The laws checked on a model as a table and as JSON."""

from collections.abc import Sequence
from typing import Any

from lmlong.attention.laws import Verdict
from lmlong.evaluation.law_check import LawReport
from lmlong.report.json_values import json_values
from lmlong.report.table import Column, format_range, format_table
from lmlong.testing import Report

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
    lines = _laws(report.verdicts)
    if report.denominators:
        rows = [[format_range(at.first, at.last), at.smallest, at.median, at.largest] for at in report.denominators]
        lines += ["", *format_table(DENOMINATORS, rows)]
    broken = sum(not verdict.kept for verdict in report.verdicts)
    text = f"{report.rows} rows of {report.tokens:,} tokens, computed in {report.precision}"
    lines += ["", f"{broken} of {len(report.verdicts)} laws broken" if broken else "all laws kept", text]
    return "\n".join(lines)


def _laws(verdicts: list[Verdict]) -> list[str]:
    rows = [[one.law, one.measured, one.allowed, "  kept" if one.kept else "  BROKEN"] for one in verdicts]
    return format_table(LAWS, rows)


def table_of_plugins(reports: Sequence[Report]) -> str:
    """Return the laws of each attention and feature map of plug-ins, for an 80-column terminal."""
    parts = ["\n".join([report.name, "", *_laws(report.verdicts)]) for report in reports]
    broken = [report.name for report in reports if not report.kept]
    return "\n\n".join([*parts, f"laws broken by {', '.join(broken)}" if broken else "all laws kept"])


def plugins_to_json(reports: Sequence[Report]) -> list[dict[str, Any]]:
    """Return the verdicts of each attention and feature map."""
    return [{"name": report.name, "kept": report.kept, "laws": _verdicts(report.verdicts)} for report in reports]


def _verdicts(verdicts: Sequence[Verdict]) -> Any:
    return json_values([{**verdict._asdict(), "kept": verdict.kept} for verdict in verdicts])


def to_json(report: LawReport) -> dict[str, Any]:
    """Return the verdicts and the denominators."""
    return json_values(
        {
            "kept": report.kept,
            "precision": report.precision,
            "rows": report.rows,
            "tokens": report.tokens,
            "laws": _verdicts(report.verdicts),
            "denominators": report.denominators,
        }
    )
