"""Perplexity against length as tables for an 80-column terminal, as JSON and as a plot."""

import math
from collections.abc import Sequence
from typing import Any

from lmlong.evaluation import differences
from lmlong.evaluation.document_sums import Sums
from lmlong.evaluation.results import PerplexityReport
from lmlong.inference.state_size import StateSize
from lmlong.recipe.lengths import name_length
from lmlong.report.figure import Figure, Level, Line, Mark, Panel, Style, style
from lmlong.report.json_values import json_values
from lmlong.report.table import Column, format_number, format_range, format_table, plural

ERROR = Column("±", 8, ".4f")
NATS = (Column("nats/token", 12, ".4f"), ERROR)
BITS = (Column("bits/byte", 11, ".4f"), ERROR)
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


def table(reports: Sequence[PerplexityReport]) -> str:
    """Return how the reports differ, then each, under one another, at most 80 columns wide but for the names."""
    marked = any(point.length == report.trained_length for report in reports for point in report.context)
    notes = ["", "* the length it was trained at"] if marked else []
    sections = ["\n".join(differences.lines(each)) for each in differences.of(reports)]
    return "\n".join(["\n\n".join([*sections, *map(_section, reports)]), *notes])


def _section(report: PerplexityReport) -> str:
    speed = report.tokens / max(report.seconds, 1e-9)
    trained = f", trained on {report.trained_tokens:,} tokens" if report.trained_tokens else ""
    on = " with carried states" if report.carried_states else ""
    facts = [
        report.name,
        f"  {report.parameters:,} parameters{trained}, at length {name_length(report.trained_length)}{on}",
        f"  {_state(report.state)}",
        *_parts(report),
        f"  {report.tokens:,} tokens read in {report.seconds:,.1f} s ({speed:,.0f} a second)"
        + ("" if report.peak_bytes is None else f", {report.peak_bytes / 1e6:,.0f} MB at most"),
    ]
    parts = [part(report) for part in (_context, _position, _protocol, _health)]
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


def _counted(report: PerplexityReport, documents: int) -> str:
    return plural(documents, "document" if report.parts_of is None else "part")


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
        rows.append([name_length(length) + mark, *_nats(sums), _perplexity(sums), *_bits(sums), *change])
        before = sums
    return [
        f"by context: the same {sums.totals.tokens:,} tokens of {_counted(report, sums.documents)} each time",
        *format_table(CONTEXT, rows),
    ]


def _position(report: PerplexityReport) -> list[str]:
    if not report.position:
        return []
    rows = [
        [format_range(first, last), *_nats(sums), *_bits(sums), sums.totals.tokens, sums.documents]
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
        f"by protocol: all {carried.totals.tokens:,} tokens of {_counted(report, carried.documents)}, in nats/token;",
        f"carried from the beginning {level}; in windows so much more",
        *format_table(PROTOCOL, rows),
    ]


def _health(report: PerplexityReport) -> list[str]:
    if not report.health:
        return []
    rows = [[at.position, at.norm, f"{at.features:.1f} of {at.of}", at.smallest] for at in report.health]
    title = "the state, over all layers and heads, while the longest document is read"
    return [title, *format_table(HEALTH, rows)]


def _nats(sums: Sums) -> tuple[float, float]:
    return sums.totals.nats_per_token, sums.nats_error


def _bits(sums: Sums) -> tuple[float, float]:
    return sums.totals.bits_per_byte, sums.bits_error


def _perplexity(sums: Sums) -> str:
    value = sums.totals.perplexity
    return f"{value:,.2f}" if value < 1e8 else f"{value:.2e}"


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
        "trained_tokens": report.trained_tokens,
        "carried_states": report.carried_states,
        "state_numbers": report.state.empty.numbers,
        "state_bytes": report.state.empty.bytes,
        "state_numbers_per_token": report.state.per_token.numbers,
        "documents": report.documents,
        "parts_of": report.parts_of,
        "tokens_read": report.tokens,
        "seconds": report.seconds,
        "peak_bytes": report.peak_bytes,
        "left_out": report.left_out,
        "context": [
            {"length": length, **_sum_values(sums), "seconds": seconds, **_change_values(sums, before)}
            for (length, sums, seconds), before in zip(report.context, befores, strict=False)
        ],
        "position": [{"first": first, "last": last, **_sum_values(sums)} for first, last, sums in report.position],
        "carried": _sum_values(carried) if carried else None,
        "windows": [
            {
                "length": length,
                "reset": {**_sum_values(reset), **_change_values(reset, carried)},
                "sliding": {**_sum_values(sliding), **_change_values(sliding, carried)},
            }
            for length, reset, sliding in report.windows
        ],
        "state": report.health,
    }


def _sum_values(sums: Sums) -> dict[str, float]:
    totals = sums.totals
    return {
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


def _change_values(sums: Sums, other: Sums | None) -> dict[str, float]:
    """Return by how many nats per token these sums exceed others of the same targets."""
    change, error = sums.above(other) if other else (math.nan, math.nan)
    return {"change": change, "change_error": error}


def figure(reports: Sequence[PerplexityReport]) -> Figure:
    """Describe bits per byte against context, position and window, with bands of two standard errors.

    All contexts have the same targets, so an error in the height of that line shifts all of it alike: its band is that
    of the change from the shortest context.
    """
    panels = [
        _panel(reports, label, describe)
        for view, describe, label in (
            ("context", _context_lines, "tokens read before the same targets\n(band: the change from the shortest)"),
            ("position", _position_lines, "tokens before, read from the beginning"),
            ("windows", _window_lines, "tokens in a window"),
        )
        if any(getattr(report, view) for report in reports)
    ]
    panels[0] = panels[0]._replace(y_label="bits per byte, ± 2 standard errors")
    return Figure([panels], size=(max(6.4, 4.6 * len(panels)), 4.4), legend_columns=3)


def _panel(reports: Sequence[PerplexityReport], label: str, describe: Any) -> Panel:
    """Describe one view of all runs, with a mark at each length that a run was trained at and a shade beyond them."""
    lines, levels = [], []
    for number, report in enumerate(reports):
        more_lines, more_levels = describe(report, style(number))
        lines += more_lines
        levels += more_levels
    ticks = sorted({int(x) for line in lines for x in line.x})
    trained = sorted({report.trained_length for report in reports})
    inside = [length for length in trained if ticks[0] <= length <= ticks[-1]]
    return Panel(
        lines,
        x_label=label,
        ticks=ticks,
        tick_name=name_length,
        levels=levels,
        marks=[Mark(length, f"trained at {name_length(length)}") for length in inside],
        shade_from=trained[-1] if ticks[0] <= trained[-1] < ticks[-1] else None,
    )


Lines = tuple[list[Line], list[Level]]


def _context_lines(report: PerplexityReport, style: Style) -> Lines:
    points = [(length, sums) for length, sums, _ in report.context]
    errors = [sums.bits_error_from(points[0][1]) for _, sums in points]
    return [_line(report.name, points, style, errors)], []


def _position_lines(report: PerplexityReport, style: Style) -> Lines:
    return [_line(report.name, [(first, sums) for first, _, sums in report.position], style)], []


def _window_lines(report: PerplexityReport, style: Style) -> Lines:
    """Describe windows that reset (filled) and slide (hollow), and the loss with a carried state as a level."""
    reset = _line(f"{report.name}, reset", [(length, sums) for length, sums, _ in report.windows], style)
    hollow = style._replace(hollow=True)
    sliding = _line(f"{report.name}, sliding", [(length, sums) for length, _, sums in report.windows], hollow)
    if not report.carried or not report.windows:
        return [reset, sliding], []
    dotted = Style(style.color, (0, (1, 2)))
    return [reset, sliding], [Level(report.carried.totals.bits_per_byte, dotted, text="carried", width=1)]


def _line(name: str, points: Sequence[tuple[int, Sums]], style: Style, errors: Sequence[float] | None = None) -> Line:
    """Describe bits per byte at some lengths, with a band of two of the errors, by default their own."""
    bits = [sums.totals.bits_per_byte for _, sums in points]
    errors = errors or [sums.bits_error for _, sums in points]
    low, high = ([bit + 2 * sign * error for bit, error in zip(bits, errors, strict=True)] for sign in (-1, 1))
    return Line(name, [length for length, _ in points], bits, style, low, high)
