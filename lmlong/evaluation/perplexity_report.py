"""Perplexity against length as tables for an 80-column terminal and as JSON."""

import math
from collections.abc import Sequence
from typing import Any

from lmlong.evaluation import context_views_report, differences
from lmlong.evaluation.context_views_report import cache_lines, recurrence_lines, remembrance_lines
from lmlong.evaluation.document_sums import Sums
from lmlong.evaluation.results import PerplexityReport
from lmlong.evaluation.sums_report import BITS, ERROR, NATS, bits, change_values, nats, perplexity, sum_values
from lmlong.model.state_size import StateSize
from lmlong.recipe.lengths import name_length
from lmlong.report.json_values import json_values
from lmlong.report.table import Column, format_number, format_range, format_table, plural

CONTEXT = [Column("length", 9), *NATS, Column("perplexity", 13), *BITS, Column("change", 10, "+.4f"), ERROR]
POSITION = [Column("tokens before", 17), *NATS, *BITS, Column("tokens", 13, ","), Column("documents", 11, ",")]
CHANGE = (Column("more", 10, "+.4f"), ERROR)
PROTOCOL = [Column("window", 9), Column("reset", 12, ".4f"), *CHANGE, Column("sliding", 12, ".4f"), *CHANGE]
HEALTH = [
    Column("tokens read", 17, ","),
    Column("norm of S", 13, ".4g"),
    Column("features in use", 19),
    Column("smallest denominator", 24, ".3g"),
]

CLEAR = 2
"""Standard errors that a gain must exceed to be reported as one."""


def table(reports: Sequence[PerplexityReport]) -> str:
    """Return the verdicts, how the reports differ, then each, at most 80 columns wide but for the names."""
    marked = any(point.length == report.trained_length for report in reports for point in report.context)
    notes = ["", "* the length it was trained at"] if marked else []
    verdicts = [line for report in reports if (line := verdict(report))]
    sections = ["\n".join(verdicts)] if verdicts else []
    sections += ["\n".join(differences.lines(each)) for each in differences.of(reports)]
    return "\n".join(["\n\n".join([*sections, *map(_section, reports)]), *notes])


def verdict(report: PerplexityReport) -> str:
    """Return the bits per byte at the longest context, and the gain from the shortest one, as one line; an empty string
    where no context was measured."""
    if not report.context:
        return ""
    shortest, longest = report.context[0], report.context[-1]
    value, error = bits(longest.sums)
    if not math.isfinite(value):
        return ""
    line = f"{report.name}: {_with_error(value, error)} bits/byte at {name_length(longest.length)}"
    if shortest.length == longest.length:
        return line
    gain, error = shortest.sums.bits_above(longest.sums)
    if abs(gain) <= CLEAR * error:
        return f"{line}, no clear gain over {name_length(shortest.length)}"
    better = "better" if gain > 0 else "worse"
    return f"{line}, {_with_error(abs(gain), error)} {better} than at {name_length(shortest.length)}"


def _with_error(value: float, error: float) -> str:
    return f"{value:.4f}" + (f" ± {error:.4f}" if math.isfinite(error) else "")


def _section(report: PerplexityReport) -> str:
    speed = report.tokens / max(report.seconds, 1e-9)
    trained = f", trained on {report.trained_tokens:,} tokens" if report.trained_tokens else ""
    on = " with carried states" if report.carried_states else ""
    facts = [
        report.name,
        f"  {report.parameters:,} parameters{trained}, at length {name_length(report.trained_length)}{on}",
        f"  {_state(report.state)}; precision {report.precision}",
        *_parts(report),
        *_clusters(report),
        f"  {report.tokens:,} tokens read in {report.seconds:,.1f} s ({speed:,.0f} a second)"
        + ("" if report.peak_bytes is None else f", {report.peak_bytes / 1e6:,.0f} MB at most"),
    ]
    parts = [part(report) for part in VIEWS]
    return "\n".join([*facts, *(line for part in parts if part for line in ("", *part))])


def _parts(report: PerplexityReport) -> list[str]:
    """Say what errors are over where documents were cut."""
    if report.parts_of is None:
        return []
    whole = plural(report.parts_of, "document")
    return [
        f"  {report.documents:,} parts of {whole}, each read from an empty state: the errors are over",
        "  parts, so wide, and of this text only; --data names more documents",
    ]


def _clusters(report: PerplexityReport) -> list[str]:
    """Say what errors are over where documents of one cluster count as one."""
    if report.cluster_by is None or report.clusters is None:
        return []
    return [f"  documents in {plural(report.clusters, 'cluster')} by {report.cluster_by}: the errors are over clusters"]


def _counted(report: PerplexityReport, sums: Sums) -> str:
    """Say how many documents have targets, and how many clusters of them where the errors are over these."""
    documents = plural(sums.documents, "document" if report.parts_of is None else "part")
    return documents if sums.cluster is None else f"{documents} in {plural(sums.clusters, 'cluster')}"


def _state(state: StateSize) -> str:
    growth = f", and {state.per_token.numbers:,} more a token" if state.per_token.numbers else ""
    return f"state of {state.empty.numbers:,} numbers, {state.empty.bytes / 1e3:,.0f} KB{growth}"


def _context(report: PerplexityReport) -> list[str]:
    if not report.context:
        return []
    sums = report.context[0].sums
    rows, before = [], None
    for length, sums, _ in report.context:
        mark = "*" if length == report.trained_length else " "
        change = sums.above(before) if before else (math.nan, math.nan)
        rows.append([name_length(length) + mark, *nats(sums), perplexity(sums), *bits(sums), *change])
        before = sums
    return [
        f"by context: the same {sums.totals.tokens:,} tokens of {_counted(report, sums)} each time",
        *format_table(CONTEXT, rows),
    ]


def _position(report: PerplexityReport) -> list[str]:
    if not report.position:
        return []
    rows = [
        [format_range(first, last), *nats(sums), *bits(sums), sums.totals.tokens, sums.documents]
        for first, last, sums in report.position
    ]
    unit = "document" if report.parts_of is None else "part"
    columns = [*POSITION[:-1], Column(f"{unit}s", 11, ",")]
    return [f"by position: each {unit} read once, from its beginning", *format_table(columns, rows)]


def _protocol(report: PerplexityReport) -> list[str]:
    if not report.windows or report.carried is None:
        return []
    carried = report.carried
    rows = [
        [name_length(length), *(cell for sums in ways for cell in (sums.totals.nats_per_token, *sums.above(carried)))]
        for length, *ways in report.windows
    ]
    level = f"{carried.totals.nats_per_token:.4f} ± {format_number(carried.nats_error, '.4f')}"
    return [
        f"by protocol: all {carried.totals.tokens:,} tokens of {_counted(report, carried)}, in nats/token;",
        f"carried from the beginning {level}; in windows so much more",
        *format_table(PROTOCOL, rows),
    ]


def _health(report: PerplexityReport) -> list[str]:
    if not report.health:
        return []
    rows = [[at.position, at.norm, f"{at.features:.1f} of {at.of}", at.smallest] for at in report.health]
    title = "the state, over all layers and heads, while the longest document is read"
    return [title, *format_table(HEALTH, rows)]


VIEWS = (_context, recurrence_lines, remembrance_lines, cache_lines, _position, _protocol, _health)


def to_json(reports: Sequence[PerplexityReport]) -> dict[str, Any]:
    """Return sums and counts, and the ratios made of them."""
    compared = {"differences": differences.values(reports)} if len(reports) > 1 else {}
    return json_values({**compared, "runs": [_report_values(report) for report in reports]})


def _report_values(report: PerplexityReport) -> dict[str, Any]:
    carried = report.carried
    befores = [None, *(point.sums for point in report.context)]
    return {
        "run": report.name,
        "checkpoint": report.checkpoint,
        "parameters": report.parameters,
        "trained_length": report.trained_length,
        "precision": report.precision,
        "trained_tokens": report.trained_tokens,
        "carried_states": report.carried_states,
        "state_numbers": report.state.empty.numbers,
        "state_bytes": report.state.empty.bytes,
        "state_numbers_per_token": report.state.per_token.numbers,
        "documents": report.documents,
        "parts_of": report.parts_of,
        "cluster_by": report.cluster_by,
        "clusters": report.clusters,
        "tokens_read": report.tokens,
        "seconds": report.seconds,
        "peak_bytes": report.peak_bytes,
        "left_out": report.left_out,
        "context": [
            {"length": length, **sum_values(sums), "seconds": seconds, **change_values(sums, before)}
            for (length, sums, seconds), before in zip(report.context, befores, strict=False)
        ],
        **context_views_report.values(report),
        "position": [{"first": first, "last": last, **sum_values(sums)} for first, last, sums in report.position],
        "carried": sum_values(carried) if carried else None,
        "windows": [
            {
                "length": length,
                "reset": {**sum_values(reset), **change_values(reset, carried)},
                "sliding": {**sum_values(sliding), **change_values(sliding, carried)},
            }
            for length, reset, sliding in report.windows
        ],
        "state": report.health,
    }
