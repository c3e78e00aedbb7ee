"""Reports as tables for an 80-column terminal."""

import math
from collections.abc import Sequence

from lmlong.evaluation.report import Report
from lmlong.evaluation.sums import Sums
from lmlong.inference.state_size import StateSize
from lmlong.lengths import name_length


def table(reports: Sequence[Report]) -> str:
    """The reports under one another, at most 80 columns wide but for the names."""
    marked = any(point.length == report.trained_length for report in reports for point in report.context)
    notes = ["", "* the length it was trained at"] if marked else []
    return "\n".join(["\n\n".join(map(_section, reports)), *notes])


def describe_state(state: StateSize) -> str:
    """The size of a state in words."""
    growth = f", and {state.per_token.numbers:,} more a token" if state.per_token.numbers else ""
    return f"state of {state.empty.numbers:,} numbers, {state.empty.bytes / 1e3:,.0f} KB{growth}"


def _section(report: Report) -> str:
    speed = report.tokens / max(report.seconds, 1e-9)
    trained = f", trained on {report.trained_tokens:,} tokens" if report.trained_tokens else ""
    facts = [
        report.name,
        f"  {report.parameters:,} parameters{trained}, at length {name_length(report.trained_length)}",
        f"  {describe_state(report.state)}",
        f"  {report.tokens:,} tokens read in {report.seconds:,.1f} s ({speed:,.0f} a second), "
        f"{report.peak_bytes / 1e6:,.0f} MB at most",
    ]
    parts = [part(report) for part in (_context, _position, _protocol, _health)]
    return "\n".join([*facts, *(line for part in parts if part for line in ("", *part))])


def _context(report: Report) -> list[str]:
    if not report.context:
        return []
    sums = report.context[0].sums
    lines = [
        f"by context: the same {sums.totals.tokens:,} tokens of {_documents(sums)} each time",
        f"{'length':>9}{'nats/token':>12}{'±':>8}{'perplexity':>13}{'bits/byte':>11}{'±':>8}{'change':>10}{'±':>8}",
    ]
    before: Sums | None = None
    for length, sums, _ in report.context:
        mark = "*" if length == report.trained_length else ""
        change, error = sums.above(before) if before else (math.nan, math.nan)
        lines.append(
            f"{name_length(length):>8}{mark:1}{_nats(sums)}{_perplexity(sums)}{_bits(sums)}"
            f"{_number(change, 10, '+.4f')}{_number(error, 8)}"
        )
        before = sums
    return lines


def _position(report: Report) -> list[str]:
    if not report.position:
        return []
    lines = [
        "by position: each document read once, from its beginning",
        f"{'tokens before':>17}{'nats/token':>12}{'±':>8}{'bits/byte':>11}{'±':>8}{'tokens':>13}{'documents':>11}",
    ]
    for first, last, sums in report.position:
        where = f"{first:,}" if first == last else f"{first:,} to {last:,}"
        lines.append(f"{where:>17}{_nats(sums)}{_bits(sums)}{sums.totals.tokens:>13,}{sums.documents:>11,}")
    return lines


def _protocol(report: Report) -> list[str]:
    if not report.windows or report.carried is None:
        return []
    carried = report.carried
    level = f"{carried.totals.nats_per_token:.4f} ± {_number(carried.nats_error, 0)}"
    lines = [
        f"by protocol: all {carried.totals.tokens:,} tokens of {_documents(carried)}, in nats/token;",
        f"carried from the beginning {level}; in windows so much more",
        f"{'window':>9}{'reset':>12}{'more':>10}{'±':>8}{'sliding':>12}{'more':>10}{'±':>8}",
    ]
    for length, *ways in report.windows:
        cells = []
        for sums in ways:
            more, error = sums.above(carried)
            cells.append(f"{sums.totals.nats_per_token:>12.4f}{_number(more, 10, '+.4f')}{_number(error, 8)}")
        lines.append(f"{name_length(length):>9}{''.join(cells)}")
    return lines


def _health(report: Report) -> list[str]:
    if not report.health:
        return []
    lines = [
        "the state, over all layers and heads, while the longest document is read",
        f"{'tokens read':>17}{'norm of S':>13}{'features in use':>19}{'smallest denominator':>24}",
    ]
    for at in report.health:
        used = f"{at.features:.1f} of {at.of}"
        lines.append(f"{at.position:>17,}{at.norm:>13.4g}{used:>19}{at.smallest:>24.3g}")
    return lines


def _documents(sums: Sums) -> str:
    return f"{sums.documents:,} document{'' if sums.documents == 1 else 's'}"


def _nats(sums: Sums) -> str:
    return f"{sums.totals.nats_per_token:>12.4f}{_number(sums.nats_error, 8)}"


def _bits(sums: Sums) -> str:
    return f"{_number(sums.totals.bits_per_byte, 11)}{_number(sums.bits_error, 8)}"


def _perplexity(sums: Sums) -> str:
    value = sums.totals.perplexity
    return f"{f'{value:,.2f}' if value < 1e8 else f'{value:.2e}':>13}"


def _number(value: float, width: int, form: str = ".4f") -> str:
    """A number, or a dash where there is none."""
    return f"{'-' if math.isnan(value) else format(value, form):>{width}}"
