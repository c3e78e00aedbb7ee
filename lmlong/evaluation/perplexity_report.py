"""Perplexity against length as tables, as JSON and as a plot with a panel for each view."""

import math
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from lmlong.evaluation.document_sums import Estimate, Sums
from lmlong.evaluation.results import CONTEXT, POSITION, PerplexityReport, format_perplexity
from lmlong.evaluation.state_health import HEALTH
from lmlong.model.state_size import StateSize, binary_size
from lmlong.recipe.lengths import name_length
from lmlong.recipe.paths import last_part
from lmlong.report.figure import Figure, Mark, Panel, lines_of
from lmlong.report.json_values import json_keys
from lmlong.report.report import Report, Table
from lmlong.report.table import Column, plural, with_error

OF_CHANGE = "change is from the row above, in nats/token"

CLEAR = 2
"""Standard errors that a gain must exceed, or it is reported as unclear."""

LEAST_SPAN = 0.02
"""Bits per byte that the vertical axis spans at least, so that less than a hundredth does not look like a trend."""


def perplexity_report(reports: Sequence[PerplexityReport]) -> Report:
    """Return the verdicts, how the reports differ, then each; in JSON sums and counts, and the ratios made of them."""
    verdicts = list(filter(None, map(verdict, reports)))
    compared = differences(reports)
    parts: list[str | Table] = ["\n".join(verdicts)] if verdicts else []
    parts += [table for each in compared for table in each.tables]
    for report in reports:
        parts += ["\n".join(_facts(report)), *views(report)]
    if any(at.trained for report in reports for at in report.by_context):
        parts.append("* the length it was trained at")
    values = {**({"differences": compared} if compared else {}), "runs": reports}
    return Report(parts, values, lambda: figure(reports))


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
        names, unit = ", ".join(map(name_length, report.left_out)), report.unit
        yield f"  left out: {names}, which too few {unit}s reach;"
        yield "  a longer text (--data) or fewer --min-documents reach them"
    speed = report.tokens / max(report.seconds, 1e-9)
    memory = "" if report.peak_bytes is None else f", {report.peak_bytes / 1e6:,.0f} MB at most"
    yield f"  {report.tokens:,} tokens read in {report.seconds:,.1f} s ({speed:,.0f} a second){memory}"


def _state(state: StateSize) -> str:
    growth = f", and {state.per_token.numbers:,} more a token" if state.per_token.numbers else ""
    single = " in float32" if state.empty.bytes == 4 * state.empty.numbers else ""
    return f"state of {state.empty.numbers:,} numbers, {binary_size(state.empty.bytes)}{single}{growth}"


def views(report: PerplexityReport) -> Iterator[Table]:
    """Yield the table of each view that was measured."""
    unit = report.unit
    if report.context:
        sums = report.context[0].sums
        targets = f"{sums.totals.tokens:,} tokens of {plural(sums.documents, unit)}"
        yield Table(f"by context: the same {targets} each time;\n{OF_CHANGE}", CONTEXT, report.by_context)
    if report.position:
        columns = [*POSITION, Column(f"{unit}s", 11, ",", value="sums.documents")]
        yield Table(f"by position: each {unit} read once, from its beginning", columns, report.position)
    if report.health:
        title = "the state, over all layers and heads, while the longest document is read"
        yield Table(title, HEALTH, report.health)


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

    @property
    def tables(self) -> list[Table | str]:
        """The differences by context and over all tokens, or the reason why none can be computed."""
        run, base, rows = self
        if not rows:
            return [f"{run.name} minus {base.name}: {_why_not_compared(run, base)}."]
        columns = [
            *with_error(Column("difference", 13, "+.4f", value="bits"), 9),
            Column(run.name, max(14, len(run.name) + 2), ".4f", value="sums.totals.bits_per_byte"),
            Column(base.name, max(14, len(base.name) + 2), ".4f", value="base.totals.bits_per_byte"),
        ]
        length = Column("length", 9, value=lambda row: name_length(row.length))
        by_context = [row for row in rows if row.length is not None]
        on_all = [row for row in rows if row.length is None]
        tables = [
            Table(self._title("the same bytes"), [length, *columns], by_context),
            Table(self._title("all bytes"), columns, on_all),
        ]
        return [table for table in tables if table.rows]

    def _title(self, targets: str) -> str:
        documents = plural(self.rows[0].sums.documents, self.run.unit)
        return (
            f"{self.run.name} minus {self.base.name}, in bits/byte on {targets} of {documents}:\n"
            "below 0 the first is better; errors are of the differences, paired"
        )


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


def _why_not_compared(run: PerplexityReport, base: PerplexityReport) -> str:
    same_text = run.text == base.text
    if run.tokenizer != base.tokenizer and (same_text or run.data == base.data != []):
        return (
            "different tokenizers, so only whole documents are the same bytes. Measure them by lmlong eval with "
            "--by position --min-documents 1, without --tokens"
        )
    return "no targets in common. Give --lengths" if same_text else "measured on another text. Name one by --data"


class Point(NamedTuple):
    """The bits per byte at one length."""

    length: int
    bits: Estimate


Points = Sequence[tuple[str, Sequence[Point]]]
"""The points of each run."""


def figure(reports: Sequence[PerplexityReport]) -> Figure:
    """Return bits per byte against context and position, with bands of two errors; by context beside the perplexity."""
    by_context = [(report.name, list(_by_context(report))) for report in reports]
    by_position = [(report.name, [Point(at.first, at.sums.per_byte) for at in report.position]) for report in reports]
    trained = sorted({report.trained_length for report in reports})
    of_context = "tokens read before the same targets\n(band: the change from the shortest)"
    panels = [
        *_panel("by context", of_context, by_context, trained, _perplexity_axis(reports)),
        *_panel("by position", "tokens before, read from the beginning", by_position, trained),
    ]
    return Figure([panels], size=(max(6.4, 4.6 * len(panels)), 4.4), legend_columns=3)


def _by_context(report: PerplexityReport) -> Iterator[Point]:
    """Yield bits per byte by context. All contexts have the same targets, so an error in the height of the line shifts
    all of it alike: its band is that of the change from the shortest context."""
    for at in report.context:
        error = at.sums.bits_error_from(report.context[0].sums)
        yield Point(at.length, Estimate(at.sums.totals.bits_per_byte, error))


def _panel(
    title: str,
    x_label: str,
    points: Points,
    trained: Sequence[int],
    right_name: Callable[[float], str] | None = None,
) -> Iterator[Panel]:
    """Yield the panel of one view of all runs, unless no run has it, with a mark at each length that a run was trained
    at, and a shade beyond all of them."""
    lines = [line for line in lines_of(points, "length", "bits.value", band="bits.band") if len(line.x)]
    if not lines:
        return
    ticks = sorted({int(x) for line in lines for x in line.x})
    first, last = ticks[0], ticks[-1]
    yield Panel(
        lines,
        title,
        x_label,
        "bits per byte, ± 2 standard errors",
        ticks=ticks,
        tick_name=name_length,
        marks=[Mark(length, f"trained at {name_length(length)}") for length in trained if first <= length <= last],
        shade_from=trained[-1] if first <= trained[-1] < last else None,
        y_limits=(0.0, math.inf),
        least_span=LEAST_SPAN,
        right_label="perplexity" if right_name else "",
        right_name=right_name or str,
    )


def _perplexity_axis(reports: Sequence[PerplexityReport]) -> Callable[[float], str] | None:
    """Return the perplexity of bits per byte, if one holds for all runs: their targets have the same number of bytes
    per token."""
    totals = [at.sums.totals for report in reports for at in report.context]
    if not totals or any(each.bytes * totals[0].tokens != totals[0].bytes * each.tokens for each in totals):
        return None
    first = totals[0]
    return lambda bits: format_perplexity(replace(first, nats=bits * first.bytes * math.log(2)).perplexity)
