"""Perplexity against length as tables for an 80-column terminal and as JSON."""

import math
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from lmlong.evaluation.document_sums import Estimate, Sums
from lmlong.evaluation.results import PerplexityReport
from lmlong.model.state_size import StateSize, binary_size
from lmlong.recipe.lengths import name_length
from lmlong.recipe.paths import last_part
from lmlong.report.json_values import json_keys, json_values
from lmlong.report.table import Column, format_range, format_table, plural, with_error


def format_perplexity(value: float) -> str:
    return f"{value:,.2f}" if value < 1e8 else f"{value:.2e}"


CONTEXT = [
    Column("length", 9, value=lambda row: name_length(row.length) + ("*" if row.trained else " ")),
    *with_error(Column("nats/token", 12, ".4f", value="sums.per_token")),
    Column("perplexity", 13, format_perplexity, value="sums.totals.perplexity"),
    *with_error(Column("bits/byte", 11, ".4f", value="sums.per_byte")),
    *with_error(Column("change", 10, "+.4f", value="change")),
]
OF_CHANGE = "change is from the row above, in nats/token"
POSITION = [
    Column("tokens before", 17, value=lambda row: format_range(row.first, row.last)),
    *with_error(Column("nats/token", 12, ".4f", value="sums.per_token")),
    *with_error(Column("bits/byte", 11, ".4f", value="sums.per_byte")),
    Column("tokens", 13, ",", value="sums.totals.tokens"),
]
HEALTH = [
    Column("tokens read", 17, ",", value="position"),
    Column("norm of S", 13, ".4g", value="norm"),
    Column("features in use", 19, value=lambda row: f"{row.features:.1f} of {row.of}"),
    Column("smallest denominator", 24, ".3g", value="smallest"),
]

CLEAR = 2
"""Standard errors that a gain must exceed, or it is reported as unclear."""


def table(reports: Sequence[PerplexityReport]) -> str:
    """Return the verdicts, how the reports differ, then each, at most 80 columns wide but for the names."""
    marked = any(point.length == report.trained_length for report in reports for point in report.context)
    notes = ["", "* the length it was trained at"] if marked else []
    verdicts = [line for report in reports if (line := verdict(report))]
    sections = ["\n".join(verdicts)] if verdicts else []
    sections += ["\n".join(difference_lines(each)) for each in differences(reports)]
    return "\n".join(["\n\n".join([*sections, *map(_section, reports)]), *notes])


def to_json(reports: Sequence[PerplexityReport]) -> dict[str, Any]:
    """Return sums and counts, and the ratios made of them."""
    compared = {"differences": differences(reports)} if len(reports) > 1 else {}
    return json_values({**compared, "runs": reports})


def verdict(report: PerplexityReport) -> str:
    """Return the bits per byte at the longest context, and the gain from the shortest one, as one line; an empty string
    where no context was measured."""
    if not report.context:
        return ""
    shortest, longest = report.context[0], report.context[-1]
    bits = longest.sums.per_byte
    if not math.isfinite(bits.value):
        return ""
    line = f"{report.name}: {_with_error(bits)} bits/byte at {name_length(longest.length)}"
    if shortest.length == longest.length:
        return line
    gain = shortest.sums.bits_above(longest.sums)
    unclear = ", unclear" if abs(gain.value) <= CLEAR * gain.error else ""
    return f"{line}, gain over {name_length(shortest.length)}: {_with_error(gain)}{unclear}"


def left_out_lengths(report: PerplexityReport, least: int) -> str:
    """Return which lengths were left out because fewer than `least` documents reach them; an empty string for none."""
    names = ", ".join(map(name_length, report.left_out))
    return f"fewer than {least} {report.unit}s reach {names}" if names else ""


def _with_error(estimate: Estimate) -> str:
    return f"{estimate.value:.4f}" + (f" ± {estimate.error:.4f}" if math.isfinite(estimate.error) else "")


def _section(report: PerplexityReport) -> str:
    return "\n".join([*_facts(report), *(line for view in _views(report) for line in ("", *view))])


def _facts(report: PerplexityReport) -> Iterator[str]:
    """Yield the model, its state, what the errors are over, and the speed of reading."""
    trained = f", trained on {report.trained_tokens:,} tokens" if report.trained_tokens else ""
    on = " with carried states" if report.carried_states else ""
    yield report.name
    yield f"  {report.parameters:,} parameters{trained}, at length {name_length(report.trained_length)}{on}"
    yield f"  {_state(report.state)}; precision {report.precision}"
    if report.weights != "32":
        yield f"  weights in {report.weights}"
    if report.data:
        files = ", ".join(map(last_part, report.data))
        yield from textwrap.wrap(f"text: {files}", 78, initial_indent="  ", subsequent_indent="  ")
    if report.parts_of is not None:
        whole = plural(report.parts_of, "document")
        yield f"  {report.documents:,} parts of {whole}, each read from an empty state: errors are over the"
        yield "  parts, so they are wide, and of this text only; --data names more documents"
    if report.left_out:
        yield f"  left out: {', '.join(map(name_length, report.left_out))}, which too few {report.unit}s reach"
    speed = report.tokens / max(report.seconds, 1e-9)
    memory = "" if report.peak_bytes is None else f", {report.peak_bytes / 1e6:,.0f} MB at most"
    yield f"  {report.tokens:,} tokens read in {report.seconds:,.1f} s ({speed:,.0f} a second){memory}"


def _state(state: StateSize) -> str:
    growth = f", and {state.per_token.numbers:,} more a token" if state.per_token.numbers else ""
    single = " in float32" if state.empty.bytes == 4 * state.empty.numbers else ""
    return f"state of {state.empty.numbers:,} numbers, {binary_size(state.empty.bytes)}{single}{growth}"


def _views(report: PerplexityReport) -> Iterator[list[str]]:
    """Yield the lines of each view that was measured."""
    unit = report.unit
    if report.context:
        sums = report.context[0].sums
        targets = f"{sums.totals.tokens:,} tokens of {plural(sums.documents, unit)}"
        yield [f"by context: the same {targets} each time;", OF_CHANGE, *format_table(CONTEXT, report.by_context)]
    if report.position:
        columns = [*POSITION, Column(f"{unit}s", 11, ",", value="sums.documents")]
        title = f"by position: each {unit} read once, from its beginning"
        yield [title, *format_table(columns, report.position)]
    if report.health:
        title = "the state, over all layers and heads, while the longest document is read"
        yield [title, *format_table(HEALTH, report.health)]


@json_keys("length", "difference=bits.value", "error=bits.error", "documents=sums.documents")
class Difference(NamedTuple):
    """Two runs on the same targets."""

    length: int | None  # tokens read before each target; None for whole documents, the state carried
    sums: Sums
    base: Sums

    @property
    def bits(self) -> Estimate:
        """Bits per byte of the run above those of the base; the error is paired by documents."""
        return self.sums.bits_above(self.base)


@json_keys("run=run.name", "base=base.name", "rows")
class Differences(NamedTuple):
    """A run against the first one."""

    run: PerplexityReport
    base: PerplexityReport
    rows: list[Difference]


def differences(reports: Sequence[PerplexityReport]) -> list[Differences]:
    """Return the differences of each further run from the first, where both have the same targets."""
    return [Differences(report, reports[0], list(_rows(report, reports[0]))) for report in reports[1:]]


def _rows(report: PerplexityReport, base: PerplexityReport) -> Iterator[Difference]:
    if report.text != base.text:
        return
    of_base = {point.length: point.sums for point in base.context}
    pairs = [(point.length, point.sums, of_base[point.length]) for point in report.context if point.length in of_base]
    for length, sums, other in [*pairs, (None, report.carried, base.carried)]:
        if sums and other and sums.has_targets_of(other):
            yield Difference(length, sums, other)


def difference_columns(compared: Differences) -> list[Column]:
    """Return the columns of a table of differences."""
    run, base, _ = compared
    return [
        Column("length", 9, value=lambda row: "whole" if row.length is None else name_length(row.length)),
        *with_error(Column("difference", 13, "+.4f", value="bits"), 9),
        Column(run.name, max(14, len(run.name) + 2), ".4f", value="sums.totals.bits_per_byte"),
        Column(base.name, max(14, len(base.name) + 2), ".4f", value="base.totals.bits_per_byte"),
    ]


def _why_not_compared(run: PerplexityReport, base: PerplexityReport) -> str:
    same_text = run.text == base.text
    if run.tokenizer != base.tokenizer and (same_text or run.data == base.data != []):
        return (
            "different tokenizers, so only whole documents are the same bytes. Measure them by lmlong eval with "
            "--by position --min-documents 1, without --tokens"
        )
    return "no targets in common. Give --lengths" if same_text else "measured on another text. Name one by --data"


def difference_lines(compared: Differences) -> list[str]:
    """Return the differences as a table."""
    run, base, rows = compared
    if not rows:
        return [f"{run.name} minus {base.name}: {_why_not_compared(run, base)}."]
    documents = plural(rows[0].sums.documents, run.unit)
    return [
        f"{run.name} minus {base.name}, in bits/byte on the same bytes of {documents}:",
        "below 0 the first is better; errors are of the differences, paired",
        *format_table(difference_columns(compared), rows),
    ]
