"""Reports as what JSON can hold: sums and counts, and the ratios made of them; null where there is no number."""

import math
from collections.abc import Iterable
from typing import Any

from lmlong.evaluation.report import Report
from lmlong.evaluation.sums import Sums


def plain(reports: Iterable[Report]) -> dict[str, Any]:
    """All of the reports."""
    return {"runs": [_report(report) for report in reports]}


def _report(report: Report) -> dict[str, Any]:
    carried = report.carried
    return {
        "run": report.name,
        "checkpoint": report.checkpoint,
        "parameters": report.parameters,
        "trained_length": report.trained_length,
        "trained_tokens": report.trained_tokens,
        "state_numbers": report.state.empty.numbers,
        "state_bytes": report.state.empty.bytes,
        "state_numbers_per_token": report.state.per_token.numbers,
        "documents": report.documents,
        "tokens_read": report.tokens,
        "seconds": report.seconds,
        "peak_bytes": report.peak_bytes,
        "left_out": report.left_out,
        "context": [
            {"length": length, **_sums(sums), "seconds": seconds, **_change(sums, before)}
            for (length, sums, seconds), before in zip(
                report.context, [None, *(point.sums for point in report.context)], strict=False
            )
        ],
        "position": [{"first": first, "last": last, **_sums(sums)} for first, last, sums in report.position],
        "carried": _sums(carried) if carried else None,
        "windows": [
            {
                "length": length,
                "reset": {**_sums(reset), **_change(reset, carried)},
                "sliding": {**_sums(sliding), **_change(sliding, carried)},
            }
            for length, reset, sliding in report.windows
        ],
        "state": [at._asdict() for at in report.health],
    }


def _sums(sums: Sums) -> dict[str, Any]:
    totals = sums.totals
    return _finite(
        {
            "nats": totals.nats,
            "tokens": totals.tokens,
            "bytes": totals.bytes,
            "documents": sums.documents,
            "nats_per_token": totals.nats_per_token,
            "nats_error": sums.nats_error,
            "perplexity": totals.perplexity,
            "bits_per_byte": totals.bits_per_byte,
            "bits_error": sums.bits_error,
        }
    )


def _change(sums: Sums, other: Sums | None) -> dict[str, Any]:
    """Nats per token above another reading of the same targets."""
    change, error = sums.above(other) if other else (math.nan, math.nan)
    return _finite({"change": change, "change_error": error})


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value if math.isfinite(value) else None for name, value in values.items()}
